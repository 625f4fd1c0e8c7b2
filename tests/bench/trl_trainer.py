"""TRL's `GRPOTrainer` with a stopwatch, in a process of its own: `python -m tests.bench.trl_trainer POLICY PROMPTS …`.

It takes two blocks of iterations and waits for a line on stdin before each, so that another trainer can be measured
between them; after each it writes a line of JSON. Everything is TRL's own but the stopwatch around methods.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.bench.inputs import GROUP, LEARNING_RATE, MINIBATCHES, REWARD_PATTERN

BLOCKS = 2


@dataclass(slots=True)
class Iteration:
    """One iteration of TRL in seconds."""

    started: float
    generation: float = 0.0
    """Generation and rewards."""
    old_logprobs: float = 0.0
    seconds: float = 0.0
    """All of it."""
    tokens: int = 0
    """Completion tokens."""


class TimedTrainer(GRPOTrainer):
    """Note when each iteration begins, and how long its parts take."""

    iterations: list[Iteration]
    generating = False

    def _generate_and_score_completions(self, inputs):
        now = time.perf_counter()
        self.iterations.append(Iteration(started=now))
        self.generating = True
        output = super()._generate_and_score_completions(inputs)
        self.generating = False
        current = self.iterations[-1]
        current.generation = time.perf_counter() - now - current.old_logprobs
        current.tokens = int(output["completion_mask"].sum())
        return output

    def _get_per_token_logps_and_entropies(self, *arguments, **options):
        started = time.perf_counter()
        found = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if self.generating:
            self.iterations[-1].old_logprobs += time.perf_counter() - started
        return found


class Blocks(TrainerCallback):
    """End an iteration after its last optimizer step; between blocks, wait to be told to go on."""

    def __init__(self, trainer: TimedTrainer, length: int, answers: TextIO) -> None:
        self.trainer, self.length, self.answers = trainer, length, answers

    def on_train_begin(self, args, state, control, **_):
        _wait()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % MINIBATCHES:
            return
        current = self.trainer.iterations[-1]
        current.seconds = time.perf_counter() - current.started
        done = len(self.trainer.iterations)
        if done % self.length == 0:
            block = self.trainer.iterations[done - self.length :]
            self.answers.write(json.dumps([asdict(iteration) for iteration in block]) + "\n")
            self.answers.flush()
            if done < BLOCKS * self.length:
                _wait()


def even_digit(completions, **_):
    """The reward that our job's configuration names."""
    return [float(re.search(REWARD_PATTERN, completion) is not None) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("policy", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--block", type=int, required=True, help="iterations per block")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints its logs; the answers stand alone
        train(options, answers)


def train(options: argparse.Namespace, answers: TextIO) -> None:
    prompts = json.loads(options.prompts.read_text())
    batch = len(prompts) * GROUP
    config = GRPOConfig(
        output_dir=str(options.policy.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # it saves memory for time, and there is memory
        per_device_train_batch_size=batch // MINIBATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=MINIBATCHES,
        num_generations=GROUP,
        max_completion_length=options.max_new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # token mean, as ours
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=BLOCKS * options.block * MINIBATCHES,
        logging_steps=MINIBATCHES,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        model=str(options.policy),
        reward_funcs=even_digit,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    trainer.iterations = []
    trainer.add_callback(Blocks(trainer, options.block, answers))
    trainer.train()


def _wait() -> None:
    sys.stdin.readline()


if __name__ == "__main__":
    main()
