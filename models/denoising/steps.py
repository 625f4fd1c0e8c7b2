"""Denoising steps as tokens: modules that compute log-probs of trained steps, and modules for supervised training.

Each row is one image. The prompt is the text, the completion contains the indices of the trained denoising steps, and
the media entry is the resulting image. The states (noisy latents) of all these steps are stored with the image. A
trained step is a step that adds enough noise to have a usable log-prob. Shapes: N trained steps of a micro-batch, D
latents of a state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from rheostat.infra.store.bundles import BundledFile
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.data.images import digest_of
from rheostat.models.denoising.families import Condition, DenoiserFamily, has_guidance_input, select_conditions
from rheostat.models.denoising.frozen_parts import FrozenParts, PromptEncoder
from rheostat.models.denoising.pipeline import WEIGHTS, read_pipeline
from rheostat.models.denoising.samplers import NoiseSchedule, noisy_steps, step_divergence, step_logprobs, transition
from rheostat.models.modeling.checkpointing import checkpoint_denoiser
from rheostat.models.modeling.layout import MicroBatch
from rheostat.models.modeling.logprobs import TokenModule
from rheostat.models.modeling.safetensors import WHOLE, FileShare, TensorFile, write_share
from rheostat.models.records.media import Gallery
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.seeds import derive_seed
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.vision.color_conversion import decode_rgb


@dataclass(frozen=True, slots=True)
class GenerationSetup:
    """All components and settings that are needed to generate or train images with a text-to-image policy, except the
    denoiser."""

    family: DenoiserFamily
    """Family of the denoiser (such as Stable Diffusion 3), which defines how the denoiser is called."""
    schedule: NoiseSchedule
    """Noise levels of the denoising steps."""
    shape: tuple[int, int, int]
    """Channels, height and width of a state (the noisy latents of an image)."""
    config: DenoisingConfig
    """Settings of image generation, such as the sampler and the guidance scale."""
    prompts: PromptEncoder
    """Frozen text encoders of the policy."""
    tokenizer: PreTrainedTokenizerFast
    """Tokenizer that encodes prompts as bytes and decodes them."""

    @classmethod
    def load(cls, directory: Path, config: DenoisingConfig, frozen: FrozenParts) -> Self:
        """Load the components from a policy's directory. The text encoders come from `frozen`, which keeps them between
        versions of a policy."""
        model = read_pipeline(directory)
        return cls(
            family=model.family,
            schedule=model.schedule(config),
            shape=model.shape(config),
            config=config,
            prompts=frozen.prompts(directory, tokens=config.text_tokens),
            tokenizer=load_tokenizer(directory),
        )

    def encode_prompts(self, prompts: Sequence[ModelInput], rows: Sequence[int]) -> Condition:
        """Return the text conditioning of prompts, with one row for each index in `rows`. Equal prompts are encoded
        once."""
        texts = [*map(self._decode_prompt, prompts)]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}  # equal within a group
        return self.prompts.select([*places], [places[texts[row]] for row in rows])

    def announce_prompts(self, prompts: Iterable[ModelInput]) -> None:
        """Announce prompts that will be encoded soon, and the empty prompt for guidance, so that the text encoders are
        copied to the GPU less often. Has no effect on the CPU."""
        self.prompts.announce(map(self._decode_prompt, prompts))
        if self.config.guidance != 1:
            self.prompts.announce([""])

    def _decode_prompt(self, prompt: ModelInput) -> str:
        return str(self.tokenizer.decode(prompt.prompt.tolist(), skip_special_tokens=True))

    def encode_empty_prompt(self, count: int, model: nn.Module) -> Condition | None:
        """Return the text conditioning of an empty prompt, repeated in `count` rows, for classifier-free guidance.

        Returns None if guidance is off (scale 1), or if the guidance scale is an input of the denoiser.
        """
        if self.config.guidance == 1 or has_guidance_input(model):
            return None
        return self.prompts.select([""], [0] * count)

    def predict(
        self,
        model: nn.Module,
        states_ND: Tensor,
        steps_N: Tensor,
        condition: Condition,
        empty_condition: Condition | None,
    ) -> Tensor:
        """Return the predicted velocity or noise for states at the beginning of their denoising steps, in float32 (N x
        D).

        `condition` is the text conditioning of the prompts. If `empty_condition` (that of the empty prompt) is not
        None, classifier-free guidance is applied.
        """
        dtype, count = next(model.parameters()).dtype, len(states_ND)
        times = torch.tensor(self.schedule.timesteps, dtype=torch.float32, device=states_ND.device)[steps_N]
        if (
            empty_condition is not None
        ):  # one forward pass for both, as in diffusers, halves the number of kernel launches
            condition = select_conditions([empty_condition, condition], range(2 * count))
            states_ND, times = states_ND.repeat(2, 1), times.repeat(2)
        states_NCYX = states_ND.view(-1, *self.shape).to(dtype)
        prediction = self.family.predict(
            model, states_NCYX, times, _cast(condition, dtype), guidance=self.config.guidance
        )
        prediction_ND = prediction.flatten(1).float()
        if empty_condition is None:
            return prediction_ND
        unconditional_ND, conditional_ND = prediction_ND[:count], prediction_ND[count:]
        return unconditional_ND + self.config.guidance * (conditional_ND - unconditional_ND)

    def trained_steps(self, within: range | None) -> range:
        """Return the contiguous range of denoising steps that are trained: all steps with enough noise, restricted to
        `within` if it is not None."""
        noisy = noisy_steps(self.config.sampler, self.schedule)
        chosen = [step for step in noisy if within is None or step in within]
        return range(chosen[0], chosen[-1] + 1) if chosen else range(0)

    def logprobs(self, next_ND: Tensor, mean_ND: Tensor, std_N: Tensor) -> Tensor:
        """Return the log-prob of each next state (N), given the mean and standard deviation of its distribution. The
        weighting is that of the configured sampler."""
        return step_logprobs(next_ND, mean_ND, std_N, weighting=self.config.sampler.weighs)


class StepInput(NamedTuple):
    """Input of one forward pass. This class is a tuple, because DeepSpeed's hooks look for tensors in tuples."""

    states_ND: Tensor
    """States (noisy latents) before each trained denoising step."""
    next_ND: Tensor
    """States after each trained denoising step. In supervised training, the target velocities."""
    steps_N: Tensor
    """Index of each trained denoising step. In supervised training, the noise levels."""
    condition: Condition
    """Text conditioning from the prompts, with one row for each state."""
    empty_condition: Condition | None
    """Text conditioning of the empty prompt for classifier-free guidance, or None without guidance."""
    num_trained: int
    """Number of trained denoising steps. If it is 0, the input contains one dummy state, so that the forward pass of
    every rank has gradients."""


class StepModule(TokenModule):
    """Base class of denoisers in training, which return one float32 number for each trained denoising step. `forward`
    takes a `StepInput`."""

    shares_prompts = False

    def __init__(self, model: nn.Module, setup: GenerationSetup, pictures: Gallery) -> None:
        super().__init__()
        self.model = cast(Any, model)
        self.setup, self.pictures = setup, pictures
        self.denoising_steps = setup.trained_steps(None)

    def checkpoint_layers(self, *, is_enabled: bool) -> None:
        """Enable gradient checkpointing of the denoiser's layers."""
        checkpoint_denoiser(self.model, is_enabled=is_enabled)

    def prepare_inputs(self, batch: MicroBatch, device: torch.device) -> Any:  # noqa: ANN401 -- StepInput
        """Convert a micro-batch to a `StepInput` on the device. The states before and after each step are read from the
        stored images."""
        setup, dimensions = self.setup, int(np.prod(self.setup.shape))
        count = len(batch.targets_N)
        if not count:
            nothing = torch.zeros(1, dimensions, device=device)
            steps_N = torch.full((1,), setup.trained_steps(None)[0], device=device)
            condition = setup.prompts.select([""], [0])
            return StepInput(nothing, nothing, steps_N, condition, setup.encode_empty_prompt(1, self.model), 0)
        states, following = [], []
        for each in batch.inputs:
            num_trained = len(each.trained_positions)
            if not num_trained:
                continue
            led = torch.from_numpy(self.pictures.states(each.images[-1], steps=num_trained).copy())
            states.append(led[:-1])
            following.append(led[1:])
        return StepInput(
            states_ND=torch.cat(states).to(device),
            next_ND=torch.cat(following).to(device),
            steps_N=torch.from_numpy(batch.targets_N).to(device),
            condition=setup.encode_prompts(batch.inputs, batch.rows_N.tolist()),
            empty_condition=setup.encode_empty_prompt(count, self.model),
            num_trained=count,
        )

    def prepare_inputs_without_replay(self, batch: MicroBatch, device: torch.device) -> Any:  # noqa: ANN401 -- StepInput
        """Return the same as `prepare_inputs`, because denoisers have no expert routers to replay."""
        return self.prepare_inputs(batch, device)

    def transitions(self, inputs: StepInput) -> tuple[Tensor, Tensor]:
        """Return the mean (N x D) and standard deviation (N) of the distribution of each next state."""
        prediction_ND = self.setup.predict(
            self.model, inputs.states_ND, inputs.steps_N, inputs.condition, inputs.empty_condition
        )
        return transition(
            self.setup.config.sampler, inputs.states_ND, prediction_ND, inputs.steps_N, self.setup.schedule
        )

    def save(
        self,
        directory: Path,
        *,
        state: Mapping[str, Tensor] | None = None,
        share: FileShare = WHOLE,
        on_progress: Callable[[], None] = lambda: None,
    ) -> dict[str, BundledFile]:
        """Write this rank's share of the denoiser's weights, without the frozen components. Returns the written files
        by their path relative to the directory. `state` contains the weights if those of the denoiser are sharded.
        `on_progress` is called after each chunk of the weights."""
        name = f"{self.setup.family.folder}/{WEIGHTS}"
        (directory / name).parent.mkdir(parents=True)
        tensors = cast(Mapping[str, Tensor], self.model.state_dict() if state is None else state)
        content = TensorFile(tensors, {"format": "pt"})
        written = write_share({directory / name: content}, share=share, on_progress=on_progress)
        return {path.relative_to(directory).as_posix(): file for path, file in written.items()}


class StepLogprobs(StepModule):
    """Denoiser that returns the log-prob of each trained denoising step."""

    _expected: tuple[Tensor, Tensor]
    """Means (N x D) and standard deviations (N) of the next states that the last forward pass predicted."""

    def forward(self, inputs: StepInput) -> Tensor:
        """Return the log-prob of each trained denoising step in float32 (N)."""
        mean_ND, std_N = self.transitions(inputs)
        self._expected = (mean_ND[: inputs.num_trained], std_N[: inputs.num_trained])
        return self.setup.logprobs(inputs.next_ND, mean_ND, std_N)[: inputs.num_trained]

    @property
    def means(self) -> Tensor:
        """Means of the next states that the last forward pass predicted (N x D)."""
        return self._expected[0]

    def divergence(self, means_ND: Tensor) -> Tensor:
        """Return the KL divergence between the distributions predicted in the last forward pass and those with the
        means `means_ND` (N), averaged over latents."""
        mean_ND, std_N = self._expected
        return step_divergence(mean_ND, means_ND, std_N)


class FlowMatching(StepModule):
    """Denoiser in supervised training on images (flow matching).

    Each row of a batch is an image with a single completion token. This token is a seed, from which the noise and the
    noise level that are applied to the image are sampled. The value returned for a row is minus the squared error of
    the prediction. The mean of the error over the rows is the loss of flow matching (arXiv 2210.02747, eq. 9), with
    levels sampled as in Stable Diffusion 3 (arXiv 2403.03206, eq. 19).
    """

    def prepare_inputs(self, batch: MicroBatch, device: torch.device) -> Any:  # noqa: ANN401 -- StepInput
        """Return a micro-batch as a `StepInput` for supervised training.

        The noise and the noise level of each row are sampled from the seed in its completion token.
        """
        if not len(batch.targets_N):
            return super().prepare_inputs(batch, device)
        noised = [_add_noise(self.pictures.encoded(each.images[-1]), int(each.completion[0])) for each in batch.inputs]
        pictures, noises, levels = (np.stack(part) for part in zip(*noised, strict=True))
        clean_ND, noise_ND = torch.from_numpy(pictures).to(device), torch.from_numpy(noises).to(device)
        levels_N1 = torch.from_numpy(levels).to(device)[:, None]
        return StepInput(
            states_ND=(1 - levels_N1) * clean_ND + levels_N1 * noise_ND,
            next_ND=noise_ND - clean_ND,
            steps_N=levels_N1[:, 0],
            condition=self.setup.encode_prompts(batch.inputs, range(len(batch.inputs))),
            empty_condition=None,
            num_trained=len(batch.inputs),
        )

    def forward(self, inputs: StepInput) -> Tensor:
        """Return minus the squared error of each row's predicted velocity, averaged over latents, in float32 (N)."""
        if not inputs.num_trained:
            return self.transitions(inputs)[0].sum(1)[:0]
        family, shape = self.setup.family, self.setup.shape
        dtype = next(self.model.parameters()).dtype
        states_NCYX = inputs.states_ND.view(-1, *shape).to(dtype)
        prediction = family.predict(
            self.model, states_NCYX, inputs.steps_N * 1000, _cast(inputs.condition, dtype), guidance=1.0
        )
        return -(prediction.flatten(1).float() - inputs.next_ND).square().mean(1)


def _cast(condition: Condition, dtype: torch.dtype) -> Condition:
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in condition.items()}


def encode_image_examples(
    examples: Sequence[tuple[str, bytes]], tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> list[ModelInput]:
    """Encode pairs of caption and image as the inputs on which `FlowMatching` is trained. The caption becomes the
    prompt, and the single completion token is a seed for the noise."""
    bound = 2**31
    return [
        ModelInput.from_prompt(tokenizer(caption)["input_ids"], (digest_of(picture),)).append_completion(
            [derive_seed("imitated", seed, row) % bound]
        )
        for row, (caption, picture) in enumerate(examples)
    ]


def _add_noise(encoded: bytes, seed: int) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Decode an image file, and sample the noise to be added to it. Returns the image as a flat array (D), the noise
    (D) and the noise level between 0 and 1."""
    rng = np.random.Generator(np.random.Philox(seed))
    level = 1 / (1 + np.exp(-rng.standard_normal(dtype=np.float32)))
    pixels_YXC = np.asarray(decode_rgb(encoded), np.float32) / 127.5 - 1
    picture_D = np.ascontiguousarray(pixels_YXC.transpose(2, 0, 1)).ravel()
    return picture_D, rng.standard_normal(picture_D.size, dtype=np.float32), np.float32(level)
