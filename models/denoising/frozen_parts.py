"""Frozen components of text-to-image policies, which all versions of a policy share: text encoders and VAE.

Text encoders are large (T5-XXL has 4.7 billion parameters), but a prompt is encoded only once. On a GPU, they therefore
occupy memory only while they encode prompts.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rheostat.infra.store.bundles import CONTENTS, Contents
from rheostat.models.denoising.families import Condition, select_conditions
from rheostat.models.denoising.pipeline import PIXELS_PER_LATENT, WEIGHTS, load_text_encoders, load_vae, read_pipeline
from rheostat.models.records.pictures import Picture, States, encode_picture

MAX_CACHED_PROMPTS: Final = 4096
"""Maximum number of prompts in the cache of a `PromptEncoder`."""
MAX_PROMPTS_AHEAD: Final = 256
"""Maximum number of announced prompts that are encoded ahead when the text encoders are on the GPU."""


class PromptEncoder:
    """Frozen text encoders of a pipeline, with a cache of the prompts encoded so far.

    Weights and cache are stored in host memory. On a GPU, the weights are copied to the device for each call of
    `encode` that needs them, and then released. Prompts are encoded one at a time, so the result for a prompt does not
    depend on the other prompts of a call.
    """

    def __init__(self, directory: Path, *, tokens: int | None, device: str | torch.device) -> None:
        model = read_pipeline(directory)
        self._pipe, self._family, self._tokens = load_text_encoders(model), model.family, tokens
        self._encoders = [getattr(self._pipe, name) for name in model.parts if name.startswith("text_encoder")]
        self._device = torch.device(device)
        self._encoded: dict[str, Condition] = {}
        self._announced: dict[str, None] = {}

    def announce(self, prompts: Iterable[str]) -> None:
        """Announce prompts that will be encoded soon. On a GPU, `encode` encodes them together with other prompts, so
        that the weights of the encoders are copied to the device less often. On the CPU, nothing is encoded ahead."""
        if self._device.type != "cpu":
            self._announced |= dict.fromkeys(prompts)

    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        """Return the text conditioning of each prompt, in host memory."""
        known = {prompt: self._encoded[prompt] for prompt in prompts if prompt in self._encoded}
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        if missing:
            waiting = (prompt for prompt in self._announced if prompt not in self._encoded and prompt not in missing)
            known |= self._encode_missing([*missing, *islice(waiting, MAX_PROMPTS_AHEAD)])
        return [known[prompt] for prompt in prompts]

    def select(self, prompts: Sequence[str], rows: Sequence[int]) -> Condition:
        """Return the text conditioning of prompts on the denoiser's device, with one row for each index in `rows`."""
        conditions = [_move(condition, self._device) for condition in self.encode(prompts)]
        return select_conditions(conditions, rows)

    def _encode_missing(self, prompts: Sequence[str]) -> dict[str, Condition]:
        """Encode prompts and add them to the cache, which is emptied first if it would become too large."""
        with torch.no_grad(), keep_on_device(self._encoders, self._device):
            encoded = {
                prompt: _move(self._family.encode(self._pipe, prompt, self._tokens, self._device), torch.device("cpu"))
                for prompt in prompts
            }
        if len(self._encoded) + len(encoded) > MAX_CACHED_PROMPTS:
            self._encoded.clear()
        self._encoded |= encoded
        self._announced = {prompt: None for prompt in self._announced if prompt not in encoded}
        return encoded


def _move(condition: Condition, device: torch.device) -> Condition:
    return {name: each.to(device) for name, each in condition.items()}


@contextmanager
def keep_on_device(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Run the block with copies of the modules' weights on a device. Afterwards, the modules have their own weights
    again and the copies are released. Nothing is copied back, so the block must not change weights."""
    if device.type == "cpu":
        yield
        return
    layers = [layer for module in modules for layer in module.modules()]
    own = [(layer, name, tensor) for layer in layers for name, tensor in _own_tensors(layer)]
    copies = dict[int, Tensor]()  # by identity, because layers can share a weight
    try:
        for layer, name, tensor in own:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to(device)
            copy = copies[id(tensor)]
            setattr(layer, name, nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy)
        copies.clear()
        yield
    finally:
        for layer, name, tensor in own:
            setattr(layer, name, tensor)


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False, remove_duplicate=False)
    yield from layer.named_buffers(recurse=False, remove_duplicate=False)


class LatentDecoder:
    """Converter from latents to images, which uses the VAE, or enlarges the latents if there is no VAE."""

    def __init__(self, directory: Path, *, device: str | torch.device) -> None:
        vae = load_vae(read_pipeline(directory))
        self._vae = None if vae is None else vae.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def decode(self, latents_NCYX: Tensor, states: Sequence[States], seeds: Sequence[int]) -> list[Picture]:
        """Convert latents to images one at a time, so that no image depends on the others of a batch."""
        return [
            encode_picture(self._pixels(each_CYX[None])[0], led, seed=seed)
            for each_CYX, led, seed in zip(latents_NCYX, states, seeds, strict=True)
        ]

    def _pixels(self, latents_1CYX: Tensor) -> NDArray[np.uint8]:
        if self._vae is None:
            image = latents_1CYX.repeat_interleave(PIXELS_PER_LATENT, 2).repeat_interleave(PIXELS_PER_LATENT, 3)
        else:
            image = self._decoded(self._vae, latents_1CYX)
        scaled = (image.float() / 2 + 0.5).clamp(0, 1).mul(255).round()
        return cast(NDArray[np.uint8], scaled.permute(0, 2, 3, 1).to(torch.uint8).cpu().numpy())

    def _decoded(self, vae: Any, latents_1CYX: Tensor) -> Tensor:  # noqa: ANN401
        config, latents = vae.config, latents_1CYX.to(vae.dtype)
        if hasattr(config, "z_dim"):  # Qwen's VAE is for videos; an image is a video of one frame
            return cast(Tensor, vae.decode(_restore(latents, config)[:, :, None], return_dict=False)[0][:, :, 0])
        latents = latents / config.scaling_factor
        if getattr(config, "latents_mean", None) is not None:
            latents = _restore(latents, config)
        return cast(Tensor, vae.decode(latents + (getattr(config, "shift_factor", None) or 0.0), return_dict=False)[0])


def _restore(latents_NCYX: Tensor, config: Any) -> Tensor:  # noqa: ANN401
    """Undo the normalization of latents in each channel, to the scale that the VAE decodes."""
    mean, std = (
        torch.tensor(each).view(1, -1, 1, 1).to(latents_NCYX) for each in (config.latents_mean, config.latents_std)
    )
    return latents_NCYX * std + mean


class FrozenParts:
    """Loader of the frozen components that all versions of a policy share (text encoders and VAE). They are loaded on
    first use, and again if those of another policy are requested or after `clear`."""

    def __init__(self, *, device: str | torch.device) -> None:
        self._device = device
        self._of: object = None
        self._prompts: tuple[int | None, PromptEncoder] | None = None
        self._latent_decoder: LatentDecoder | None = None

    def prompts(self, directory: Path, *, tokens: int | None) -> PromptEncoder:
        """Return the text encoders of a pipeline. `tokens` is the maximum prompt length, or None for the default."""
        self._turn_to(directory)
        if self._prompts is None or self._prompts[0] != tokens:
            self._prompts = (tokens, PromptEncoder(directory, tokens=tokens, device=self._device))
        return self._prompts[1]

    def latent_decoder(self, directory: Path) -> LatentDecoder:
        """Return the decoder from latents to images for the pipeline in a directory."""
        self._turn_to(directory)
        self._latent_decoder = self._latent_decoder or LatentDecoder(directory, device=self._device)
        return self._latent_decoder

    def clear(self) -> None:
        """Release the loaded components and their memory."""
        self._of = self._prompts = self._latent_decoder = None

    def _turn_to(self, directory: Path) -> None:
        files = _frozen_files(directory)
        if files != self._of:
            self.clear()
            self._of = files


def _frozen_files(directory: Path) -> object:
    """Return a value that identifies the frozen files of a policy, and is equal for all of the policy's versions."""
    if not (directory / CONTENTS).is_file():
        return directory
    weights = f"{read_pipeline(directory).family.folder}/{WEIGHTS.partition('.')[0]}"
    files = Contents.model_validate_json((directory / CONTENTS).read_text()).files
    return {name: file.digest for name, file in files.items() if not name.startswith(weights)}
