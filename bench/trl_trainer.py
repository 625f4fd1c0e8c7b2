"""TRL's `GRPOTrainer` with a timer, in a separate process: `python -m bench.trl_trainer WORKLOAD`.

It waits for a line on stdin before each block of iterations, so that another trainer can be measured in between, and
writes a line of JSON after each block. Everything is TRL's own code except the timer around methods and, with vLLM, the
lengths of completions. The process needs trl and its requirements, vLLM only if the workload uses it, and no package of
Rheostat's.
"""

import contextlib
import json
import os
import re
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.trl_workload import TrlIteration, Workload, read_workload
from rheostat.models.vision.color_conversion import decode_rgb


class TimedTrainer(GRPOTrainer):
    """TRL's GRPO trainer, which also records the seconds of generation and of old log-probs in each iteration."""

    iterations: list[TrlIteration]
    generating = False

    def _generate_and_score_completions(self, inputs):
        now = time.perf_counter()
        self.iterations.append(TrlIteration(started=now))
        self.generating = True
        output = super()._generate_and_score_completions(inputs)
        self.generating = False
        current = self.iterations[-1]
        current.generation = time.perf_counter() - now - current.old_logprobs
        current.tokens = int(output["completion_mask"].sum())
        return output

    def _get_per_token_logps_and_entropies(self, *arguments, **options):
        started = time.perf_counter()
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if self.generating:
            _finish()
            self.iterations[-1].old_logprobs += time.perf_counter() - started
        return outputs


class Blocks(TrainerCallback):
    """Trainer callback that runs iterations in blocks, so that another trainer can be measured between blocks.

    Each block starts with a line on stdin. At its end, the times of its iterations are written as one line of JSON.
    """

    def __init__(self, trainer: TimedTrainer, workload: Workload, answers: TextIO) -> None:
        self.trainer, self.workload, self.answers = trainer, workload, answers

    def on_train_begin(self, args, state, control, **_):
        sys.stdin.readline()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.workload.minibatches:
            return
        _finish()
        current = self.trainer.iterations[-1]
        current.seconds = time.perf_counter() - current.started
        current.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done, length = len(self.trainer.iterations), self.workload.block
        if done % length == 0:
            block = self.trainer.iterations[done - length :]
            self.answers.write(json.dumps([asdict(iteration) for iteration in block]) + "\n")
            self.answers.flush()
            if done < self.workload.blocks * length:
                sys.stdin.readline()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints logs, but stdout must contain only answers
        train(read_workload(Path(sys.argv[1])), answers)


def train(workload: Workload, answers: TextIO) -> None:
    pattern = re.compile(workload.reward_pattern)

    def found(completions, **_):
        texts = (each if isinstance(each, str) else each[0]["content"] for each in completions)
        return [float(pattern.search(text) is not None) for text in texts]

    trainer = TimedTrainer(
        model=str(workload.policy),
        reward_funcs=found,
        args=config_of(workload),
        train_dataset=Dataset.from_dict(build_prompts(workload)),
    )
    trainer.iterations = []
    if workload.images:
        count_images(trainer)
    trainer.add_callback(Blocks(trainer, workload, answers))
    if workload.vllm is not None:
        end_at_lengths(trainer, workload.vllm.lengths)
        if not torch.cuda.is_available():
            load_on_cpu(trainer)
        time_weights(trainer)
    trainer.train()


def build_prompts(workload: Workload) -> dict[str, list[object]]:
    """Return the columns of TRL's training data set.

    If the workload has images, each prompt becomes a chat of one message with an image.
    """
    if not workload.images:
        return {"prompt": [*workload.prompts]}
    chats = [[{"role": "user", "content": prompt}] for prompt in workload.prompts]
    return {"prompt": chats, "image": [decode_rgb(Path(path).read_bytes()) for path in workload.images]}


def count_images(trainer: TimedTrainer) -> None:
    """Install a hook that counts the images that the vision tower encodes in each iteration."""
    tower = trainer.model.model.vision_model

    def count(_module, _arguments, options) -> None:
        trainer.iterations[-1].images += len(options["pixel_values"])

    tower.register_forward_pre_hook(count, with_kwargs=True)


def config_of(workload: Workload) -> GRPOConfig:
    """Return the TRL configuration with the same batch sizes, lengths and optimizer settings as Rheostat's job."""
    batch = len(workload.prompts) * workload.group
    accumulated = batch // workload.minibatches // workload.microbatch
    vllm = workload.vllm
    colocated = {} if vllm is None else {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": vllm.memory_share,
        "vllm_max_model_length": vllm.context,
        "vllm_enable_sleep_mode": vllm.sleeps,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    }  # fmt: skip
    return GRPOConfig(
        output_dir=str(workload.policy.parent / "trl"),
        use_cpu=not torch.cuda.is_available(),
        bf16=workload.bfloat16,
        gradient_checkpointing=False,  # it would save memory at the cost of time, and there is enough memory
        per_device_train_batch_size=workload.microbatch,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=workload.minibatches * accumulated,
        num_generations=workload.group,
        max_completion_length=workload.max_new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # mean over tokens, as in Rheostat
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        max_steps=workload.blocks * workload.block * workload.minibatches,
        logging_steps=workload.minibatches,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **colocated,
    )


def end_at_lengths(trainer: TimedTrainer, lengths: tuple[tuple[int, ...], ...]) -> None:
    """Replace vLLM's `generate`, so that every completion ends at a specified length and EOS is ignored.

    `lengths` contains the lengths in tokens of all completions of each iteration.
    """
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def of_given_lengths(prompts, sampling_params, **options):
        target_lengths = lengths[len(trainer.iterations) - 1]
        each = []
        for length in target_lengths:
            one = sampling_params.clone()
            one.max_tokens, one.ignore_eos = length, True
            each.append(one)
        return generate(prompts, sampling_params=each, **options)

    llm.generate = of_given_lengths


def load_on_cpu(trainer: TimedTrainer) -> None:
    """Replace TRL's loading of weights into vLLM by vLLM's own reload function.

    TRL's loading fails on vLLM's CPU build, which repacks some tensors.
    """
    vllm = trainer.vllm_generation

    def reload() -> None:
        weights = ((name, parameter.data) for name, parameter in trainer.model.named_parameters())
        vllm.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        vllm.llm.reset_prefix_cache()

    vllm.sync_weights = reload


def time_weights(trainer: TimedTrainer) -> None:
    """Wrap the loading of weights into vLLM, so that its seconds are recorded in each iteration."""
    sync = trainer.vllm_generation.sync_weights

    def timed() -> None:
        started = time.perf_counter()
        sync()
        _finish()
        trainer.iterations[-1].weights += time.perf_counter() - started

    trainer.vllm_generation.sync_weights = timed


def _finish() -> None:
    """Wait until the GPU, if there is one, has finished all work, so that timers include it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
