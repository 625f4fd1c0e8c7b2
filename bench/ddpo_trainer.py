"""TRL's `DDPOTrainer` with a stopwatch, in a process of its own: `python -m bench.ddpo_trainer WORKLOAD`.

Everything is TRL's own but the stopwatch. It needs trl and its requirements, and nothing of ours.
"""

import itertools

import numpy as np
import torch
from accelerate import PartialState
from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

from bench.ddpo_workload import DrawingWorkload, EpochCost, Stopwatch, answer_epochs, peak_bytes


class TimedTrainer(DDPOTrainer):
    """Note when pictures have their rewards: advantages, a line of numpy, count to training."""

    watch: Stopwatch
    drawn: tuple[float, float]

    def compute_rewards(self, prompt_image_pairs, is_async=False):
        found = super().compute_rewards(prompt_image_pairs, is_async=is_async)
        self.drawn = self.watch.lap()
        return found


def begin(workload: DrawingWorkload):
    """Build the trainer and write the trail."""
    torch.set_num_threads(1)
    PartialState(cpu=True)  # DDPOTrainer logs before it makes its Accelerator, and accelerate would refuse that
    asked = itertools.cycle([(prompt, {}) for prompt in workload.prompts for _ in range(workload.group)])
    pipeline = DefaultDDPOStableDiffusionPipeline(str(workload.pipeline), use_lora=False)
    trainer = TimedTrainer(config_of(workload), bright, lambda: next(asked), pipeline)
    pipeline.set_progress_bar_config(disable=True)
    write_trail(trainer, workload)

    def take() -> EpochCost:
        trainer.watch = Stopwatch.started()
        trainer.step(0, 0)  # of epoch 0, which saves no checkpoint
        drawn, trained = trainer.drawn, trainer.watch.lap()
        return EpochCost(*drawn, *trained, loading_cpu=0.0, peak_bytes=peak_bytes())

    return take


def bright(images, prompts, metadata):
    """Reward a picture's mean."""
    return images.mean(dim=(1, 2, 3)), {}


def config_of(workload: DrawingWorkload) -> DDPOConfig:
    """The same recipe as ours."""
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
        train_batch_size=workload.states,  # pictures, of which a pass reads one step each
        train_gradient_accumulation_steps=workload.pictures // workload.minibatches // workload.states,
        train_timestep_fraction=workload.learnt / workload.steps,
        train_learning_rate=workload.learning_rate,
        train_adam_weight_decay=workload.weight_decay,
        train_clip_range=workload.clip,
    )


def write_trail(trainer: DDPOTrainer, workload: DrawingWorkload) -> None:
    """Write what TRL says of the steps that it draws."""
    [drawn], [[_, prompts, _]] = trainer._generate_samples(1, workload.together)
    states = {name: drawn[name].numpy() for name in ("latents", "next_latents", "log_probs")}
    np.savez(workload.trail, prompts=np.array(prompts), **states)


if __name__ == "__main__":
    answer_epochs(begin)
