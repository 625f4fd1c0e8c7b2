"""TRL's `DDPOTrainer` with a timer, in a separate process: `python -m bench.ddpo_trainer WORKLOAD`.

Everything except the timer is TRL's own code. The process needs trl and its requirements, and no package of Rheostat's.
"""

import itertools

import numpy as np
import torch
from accelerate import PartialState
from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

from bench.ddpo_workload import DrawingWorkload, EpochCost, Stopwatch, peak_bytes, serve_epochs


class TimedTrainer(DDPOTrainer):
    """TRL's DDPO trainer, which also measures the time until all images are generated and have rewards.

    The computation of advantages (one line of numpy) counts as training.
    """

    watch: Stopwatch
    drawn: tuple[float, float]

    def compute_rewards(self, prompt_image_pairs, is_async=False):
        rewards = super().compute_rewards(prompt_image_pairs, is_async=is_async)
        self.drawn = self.watch.restart()
        return rewards


def begin(workload: DrawingWorkload):
    """Set up the TRL side of the benchmark, and return a function that runs one training epoch and returns its cost.

    Also writes a sample of generated denoising states with their log-probs to the file `workload.trail`.
    """
    torch.set_num_threads(1)
    PartialState(cpu=True)  # DDPOTrainer logs before it builds its Accelerator, which accelerate would refuse
    prompts = itertools.cycle([(prompt, {}) for prompt in workload.prompts for _ in range(workload.group)])
    pipeline = DefaultDDPOStableDiffusionPipeline(str(workload.pipeline), use_lora=False)
    trainer = TimedTrainer(config_of(workload), bright, lambda: next(prompts), pipeline)
    pipeline.set_progress_bar_config(disable=True)
    write_trail(trainer, workload)

    def take() -> EpochCost:
        trainer.watch = Stopwatch.started()
        trainer.step(0, 0)  # as epoch 0, which saves no checkpoint
        drawn, trained = trainer.drawn, trainer.watch.restart()
        return EpochCost(*drawn, *trained, loading_cpu=0.0, peak_bytes=peak_bytes())

    return take


def bright(images, prompts, metadata):
    """Return the mean brightness of each image as its reward, and empty metadata.

    `prompts` and `metadata` are ignored.
    """
    return images.mean(dim=(1, 2, 3)), {}


def config_of(workload: DrawingWorkload) -> DDPOConfig:
    """Return the TRL configuration with the same sampling and optimizer settings as Rheostat's run."""
    return DDPOConfig(
        mixed_precision="no",
        allow_tf32=False,
        accelerator_kwargs={"cpu": True},
        sample_num_steps=workload.steps,
        sample_eta=1.0,
        sample_guidance_scale=workload.guidance,
        sample_batch_size=workload.together,
        sample_num_batches_per_epoch=workload.pictures // workload.together,
        train_cfg=workload.guidance > 1,
        train_batch_size=workload.states,  # images; a forward pass reads one step of each
        train_gradient_accumulation_steps=workload.pictures // workload.minibatches // workload.states,
        train_timestep_fraction=workload.learnt / workload.steps,
        train_learning_rate=workload.learning_rate,
        train_adam_weight_decay=workload.weight_decay,
        train_clip_range=workload.clip,
    )


def write_trail(trainer: DDPOTrainer, workload: DrawingWorkload) -> None:
    """Generate images with TRL, and write the states and log-probs of their denoising steps to `workload.trail`.

    The benchmark checks that Rheostat computes the same log-probs for these steps.
    """
    [drawn], [[_, prompts, _]] = trainer._generate_samples(1, workload.together)
    states = {name: drawn[name].numpy() for name in ("latents", "next_latents", "log_probs")}
    np.savez(workload.trail, prompts=np.array(prompts), **states)


if __name__ == "__main__":
    serve_epochs(begin)
