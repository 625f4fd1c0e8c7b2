"""Generation of images inside the worker with diffusers' models.

Shapes: N images that are generated together, D values of a state (the flattened latent of one image).
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from rheostat.infra.errors import BadInput
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.engines import DiffusersEngine, SamplingConfig
from rheostat.models.denoising.frozen_parts import FrozenParts, LatentDecoder
from rheostat.models.denoising.policy import load_merged_denoiser
from rheostat.models.denoising.samplers import deterministic, transition
from rheostat.models.denoising.steps import GenerationSetup
from rheostat.models.engines.device import choose_device
from rheostat.models.engines.protocol import Completion, Request, StepSums
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.pictures import States
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import ModelVersion

SHOWN: Final = "[picture]"
"""Text that stands for a generated image in the text of a completion. Reports and judges receive the image in addition
to this text."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Loaded text-to-image policy: its denoiser, its latent decoder and its digest."""

    directory: Path
    model: nn.Module
    latent_decoder: LatentDecoder
    digest: str


class DiffusersImageEngine:
    """Rollout engine for text-to-image policies. It generates up to `max_batch_rows` images at a time, in the order of
    the requests.

    The requests alone determine which images share a batch. The same requests give the same images, bit for bit, in
    every process with the same software and number of threads. If an image is generated in another batch, its noise
    stays the same, but its values may be rounded differently.
    """

    def __init__(self, config: DiffusersEngine, *, adapter_rank: int = 0) -> None:  # adapters are merged
        self.progress = 0
        self._config = config
        self._device = choose_device()
        self._policy: _Loaded | None = None
        self._frozen = FrozenParts(device=self._device)
        self._setups: dict[DenoisingConfig, GenerationSetup] = {}
        self._steps = StepSums()

    def producer(self) -> str:
        return self._config.kind

    def load(self, directory: Path, policy: ModelVersion, *, adapter: Path | None = None) -> int:
        self._unload()  # the old weights are freed before the new ones are loaded, because two policies may not fit
        dtype = getattr(torch, self._config.dtype)
        model = load_merged_denoiser(directory, adapter, device=self._device, dtype=dtype).eval().requires_grad_(False)
        self._policy = _Loaded(directory, model, self._frozen.latent_decoder(directory), policy.digest)
        self.progress += 1
        return policy.weights.bytes + (policy.adapter.bytes if policy.adapter is not None else 0)

    def loaded_digest(self) -> str:
        return "" if self._policy is None else self._policy.digest

    def sleep(self) -> None:
        self._frozen.clear()
        self._unload()

    def _unload(self) -> None:
        """Free the denoiser, but keep the text encoders and VAE, which the next version of the policy shares."""
        self._setups = {}
        if self._policy is None:
            return
        self._policy = None
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.sleep()

    def step_sums(self) -> StepSums:
        return self._steps

    def score_continuations(
        self, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        raise BadInput(
            f"rollout.engine {self.producer()!r} generates pictures, so it cannot compute log-probs of texts. Use a "
            "language engine such as 'transformers'"
        )

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        raise BadInput(
            f"rollout.engine {self.producer()!r} generates pictures, not text. Set [rollout.denoising] for pictures, "
            "or use a language engine such as 'transformers'"
        )

    def generate_images(
        self, requests: Sequence[Request], denoising: DenoisingConfig, trained_steps: range | None
    ) -> list[list[Completion]]:
        assert self._policy is not None, "generate_images before load"
        rows = [(each, seed) for request in requests for each, seed in zip(request.inputs, request.seeds, strict=True)]
        self._build_setup(self._policy, denoising).announce_prompts(each for each, _ in rows)
        size = self._config.max_batch_rows
        completions: list[Completion] = []
        for start in range(0, len(rows), size):
            completions += self._generate_batch(rows[start : start + size], denoising, trained_steps)
        counts = [len(request.seeds) for request in requests]
        ends = np.cumsum(counts)
        return [completions[end - count : end] for count, end in zip(counts, ends, strict=True)]

    @torch.no_grad()
    def _generate_batch(
        self, rows: Sequence[tuple[ModelInput, int]], denoising: DenoisingConfig, trained_steps: range | None
    ) -> list[Completion]:
        assert self._policy is not None, "generate_images before load"
        policy, setup = self._policy, self._build_setup(self._policy, denoising)
        noisy, count = setup.trained_steps(trained_steps), len(rows)
        noises = [np.random.Generator(np.random.Philox(seed)) for _, seed in rows]
        conditions = setup.encode_prompts([each for each, _ in rows], range(count))
        empty_condition = setup.encode_empty_prompt(count, policy.model)
        states_ND = self._sample_noise(noises, setup)
        trail, logprobs = list[Tensor](), list[Tensor]()
        for step in range(denoising.steps):
            started, steps_N = time.perf_counter(), torch.full((count,), step, device=self._device)
            prediction_ND = setup.predict(policy.model, states_ND, steps_N, conditions, empty_condition)
            if step in noisy and not denoising.sampler.is_deterministic:
                mean_ND, std_N = transition(denoising.sampler, states_ND, prediction_ND, steps_N, setup.schedule)
                trail = trail or [states_ND]
                states_ND = mean_ND + std_N[:, None] * self._sample_noise(noises, setup)
                trail.append(states_ND)
                logprobs.append(setup.logprobs(states_ND, mean_ND, std_N))
            else:
                states_ND = deterministic(states_ND, prediction_ND, steps_N, setup.schedule)
            self.progress += 1
            self._steps = self._steps.add(count, time.perf_counter() - started)
        if noisy and denoising.sampler.is_deterministic:
            trail = [states_ND]
        latents, seeds = states_ND.view(-1, *setup.shape), [seed for _, seed in rows]
        pictures = policy.latent_decoder.decode(latents, _split_rows(trail, count), seeds)
        steps = tuple(noisy) or tuple(range(denoising.steps))
        step_logprobs = torch.stack(logprobs, dim=1).tolist() if logprobs else [[0.0] * len(steps)] * count
        return [
            Completion(steps, tuple(logprobs), SHOWN, FinishReason.STOP, picture=picture)
            for logprobs, picture in zip(step_logprobs, pictures, strict=True)
        ]

    def _sample_noise(self, noises: Sequence[np.random.Generator], setup: GenerationSetup) -> Tensor:
        size = int(np.prod(setup.shape))
        noise_ND = np.stack([each.standard_normal(size, dtype=np.float32) for each in noises])
        return torch.from_numpy(noise_ND).to(self._device)

    def _build_setup(self, policy: _Loaded, denoising: DenoisingConfig) -> GenerationSetup:
        if denoising not in self._setups:
            self._setups[denoising] = GenerationSetup.load(policy.directory, denoising, self._frozen)
        return self._setups[denoising]


def _split_rows(trail: Sequence[Tensor], count: int) -> list[States]:
    """Return the denoising states of each image that training needs, or one empty array per image if no step is
    trained. `trail` contains the states of all images before the first trained step and after each of them, or only
    the final states if the sampler is deterministic."""
    if not trail:
        return [np.empty((0, 0), np.float32)] * count
    return [*torch.stack([*trail], dim=1).cpu().numpy()]
