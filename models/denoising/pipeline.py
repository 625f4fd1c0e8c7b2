"""Policies that draw, as directories in diffusers format: read and checked, loaded in parts, and written.

A directory has a denoiser, which is trained, and beside it a scheduler, text encoders with their tokenizers and mostly
a VAE, which stay as they are. Nothing is fetched and no code of a directory runs.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from shutil import copyfile
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from infra.errors import BadInput
from infra.store.bundles import CONTENTS, Contents
from models.config.denoising import DenoisingConfig
from models.denoising.families import Condition, DenoiserFamily, PromptLimit, class_of, family_of
from models.denoising.samplers import NoiseSchedule, noisy_steps
from models.denoising.schedulers import check_scheduler, schedule_of
from models.modeling.policy import making_models
from models.modeling.weight_files import read_header
from models.records.pictures import Picture, States, picture_of

INDEX: Final = "model_index.json"
WEIGHTS: Final = "diffusion_pytorch_model.safetensors"
FROZEN: Final = ("*.json", "*.txt", "*.model", "*.safetensors")
"""What is kept of the parts: configuration, tokenizers and weights; never code or pickles."""
PIXELS_PER_LATENT: Final = 8
"""Of a policy without VAE: a side of a latent in pixels, as diffusers has it too."""
_UNUSED: Final = ("safety_checker", "feature_extractor", "image_encoder", "watermark")
"""Parts that pictures are not drawn with."""
_LIBRARIES: Final = ("diffusers", "transformers")
_LOADING: Final = (ValueError, KeyError, TypeError, OSError, RuntimeError, AttributeError, ImportError, SafetensorError)
"""What libraries raise for files that they cannot make a part of."""


def is_pipeline(directory: Path) -> bool:
    """Whether a directory is in diffusers format."""
    return (directory / INDEX).is_file()


@dataclass(frozen=True, slots=True)
class PictureModel:
    """What is known of a directory from its configuration files."""

    directory: Path
    pipeline: str
    family: DenoiserFamily
    denoiser: Mapping[str, Any]
    """Configuration of the denoiser."""
    scheduler: Mapping[str, Any]
    vae: Mapping[str, Any] | None
    """Configuration of what makes pictures of latents; none where latents are pixels."""
    parts: tuple[str, ...]
    """Names of the parts that it is drawn with, which are the folders that they lie in."""

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"policy {self.directory}"

    @property
    def pixels(self) -> int:
        """Pixels on a side of a latent."""
        if self.vae is None:
            return PIXELS_PER_LATENT
        halvings = self.vae.get("temperal_downsample") or self.vae["block_out_channels"][1:]
        return int(2 ** len(halvings))

    @property
    def limits(self) -> list[PromptLimit]:
        """How much it reads of a prompt, by each encoder that it has; the first reads most."""
        return [each for each in self.family.limits if {each.tokenizer, each.encoder} <= {*self.parts}]

    def shape(self, config: DenoisingConfig) -> tuple[int, int, int]:
        """Channels, height and width of a state. Raises BadInput for a side that the model cannot draw."""
        patch = self.family.patch(self.denoiser)
        side, unit = config.side or self.family.side(self.denoiser) * self.pixels, self.pixels * patch
        if side % unit:
            raise BadInput(
                f"rollout.denoising.side {side}: expected a multiple of {unit} pixels, the least that "
                f"{self.family.denoiser} draws; the nearest is {max(unit, round(side / unit) * unit)}"
            )
        most = self.denoiser.get("pos_embed_max_size")
        if most and side > most * unit:
            raise BadInput(
                f"rollout.denoising.side {side}: its {self.family.denoiser} draws at most {most * unit} pixels"
            )
        return self.family.channels(self.denoiser), side // self.pixels, side // self.pixels

    def tokens(self, config: DenoisingConfig) -> int:
        """Count the tokens that the denoiser reads a state as; of a UNet, its latents."""
        return self.family.tokens(self.denoiser, self.shape(config)[1])

    def schedule(self, config: DenoisingConfig) -> NoiseSchedule:
        """The levels of noise of a drawing. Raises BadInput where the sampler is not for such models."""
        return schedule_of(self.scheduler, self.family, config, tokens=self.tokens(config))

    def check(self, config: DenoisingConfig) -> int:
        """Count the tokens that it reads of a picture to learn from it.

        Raises BadInput where it cannot draw so, or where the window has steps that are not learnt.
        """
        noisy, window = noisy_steps(config.sampler, self.schedule(config)), config.window
        if not noisy:
            raise BadInput(f"rollout.denoising.steps {config.steps}: no step has noise enough to be learnt, use more")
        if window is not None and window.last + window.size - 1 > noisy[-1]:
            raise BadInput(
                f"rollout.denoising.window.last {window.last} and size {window.size}: step {noisy[-1]} is the last one "
                f"with noise enough to be learnt; expected window.last {max(0, noisy[-1] + 1 - window.size)} at most"
            )
        return self.tokens(config) * (len(noisy) if window is None else window.size)


def read_pipeline(directory: Path) -> PictureModel:
    """Read what a directory says of itself. Raises BadInput where it is no policy that can be trained here."""
    where = f"policy {directory}"
    if not directory.is_dir():
        raise BadInput(f"{where}: no such directory")
    if not is_pipeline(directory):
        raise BadInput(f"{where}: no {INDEX}: not a directory in diffusers format; policy.kind 'directory' is for text")
    index = _object(directory / INDEX)
    pipeline = index.get("_class_name")
    folder = "unet" if "unet" in index else "transformer"
    part = index.get(folder)
    denoiser = part[1] if isinstance(part, list) and len(part) == 2 else None
    try:
        family = family_of(str(pipeline), str(denoiser))
        config = _object(directory / folder / "config.json")
        family.check(config)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    scheduler = _object(directory / "scheduler" / "scheduler_config.json")
    check_scheduler(scheduler, family, where=where)
    parts = _parts(index, where=where)
    vae = _object(directory / "vae" / "config.json") if "vae" in parts else None
    found = PictureModel(directory, str(pipeline), family, config, scheduler, vae, parts)
    if vae is not None and (latents := vae.get("z_dim") or vae.get("latent_channels")) != family.channels(config):
        raise BadInput(f"{where}: its vae has {latents} channels, its {folder} {family.channels(config)}")
    return found


def _parts(index: Mapping[str, Any], *, where: str) -> tuple[str, ...]:
    """Name the parts that there are. Raises BadInput for one that is not of a library that we know."""
    found = {name: part for name, part in index.items() if isinstance(part, list) and name not in _UNUSED}
    for name, part in found.items():
        if len(part) != 2 or part[0] not in (None, *_LIBRARIES):
            raise BadInput(f"{where}: {INDEX}: {name} {part!r}: expected a class of {' or '.join(_LIBRARIES)}")
    return tuple(name for name, part in found.items() if part[0] is not None)


# ---- parts
@contextmanager
def _loading(model: PictureModel, part: str) -> Iterator[None]:
    """Have what libraries say of files that do not load be one line."""
    try:
        with making_models():
            yield
    except _LOADING as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(f"{model.where}: cannot load its {part}: {first}") from error


def load_denoiser(
    directory: Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Load what is trained. Raises BadInput where its weights are not there."""
    model = read_pipeline(directory)
    folder = model.family.folder
    with _loading(model, folder):
        found = class_of(model.family.denoiser).from_pretrained(
            str(directory / folder),
            torch_dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            low_cpu_mem_usage=False,
        )
    # Cast once more: where the first tensor is a float32 buffer, as in Stable Diffusion 3, diffusers casts none.
    return cast(nn.Module, found.to(device=device, dtype=dtype))


def load_part(model: PictureModel, part: str) -> Any:  # noqa: ANN401 -- what model_index.json says
    """Load a tokenizer of the class that the directory names. Raises BadInput where it does not load."""
    library, kind = _object(model.directory / INDEX)[part]
    with _loading(model, part):
        return getattr(import_module(library), kind).from_pretrained(str(model.directory / part), local_files_only=True)


def outlined_denoiser(model: PictureModel) -> nn.Module:
    """Names and shapes of the denoiser's weights."""
    kind = class_of(model.family.denoiser)
    with making_models(), torch.device("meta"):
        return cast(nn.Module, kind.from_config(dict(model.denoiser)))


def check_weights(model: PictureModel) -> int:
    """Compare names and shapes of the denoiser's weights with its configuration; return its number of parameters."""
    wanted = {name: tuple(each.shape) for name, each in outlined_denoiser(model).state_dict().items()}
    folder = model.directory / model.family.folder
    for part in model.parts:
        has_weights = part == model.family.folder or part == "vae" or part.startswith("text_encoder")
        if has_weights and not any((model.directory / part).glob("*.safetensors")):
            raise BadInput(f"{model.where}: no safetensors in {part}; pickled weights are never loaded")
    found: dict[str, tuple[int, ...]] = {}
    for path in _weights_in(folder, where=model.where):
        header = read_header(path, where=f"{model.where}: {model.family.folder}")
        found |= {name: weight.shape for name, weight in header.items()}
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    if wrong:
        raise BadInput(
            f"{model.where}: {model.family.folder}: {len(wrong)} weights are not as its config.json says, first "
            f"{wrong[0]}: expected {wanted[wrong[0]]}, found {found.get(wrong[0])}"
        )
    return sum(int(np.prod(shape)) for shape in wanted.values())


def _weights_in(folder: Path, *, where: str) -> list[Path]:
    """Name the files that diffusers loads: not those of a variant, such as fp16, that may lie beside them."""
    index = folder / f"{WEIGHTS}.index.json"
    named = set(_object(index).get("weight_map", {}).values()) if index.is_file() else {WEIGHTS}
    if absent := sorted(name for name in named if not (folder / name).is_file()):
        raise BadInput(f"{where}: {folder.name}: expected {absent[0]}, found none")
    return [folder / name for name in sorted(named)]


class PromptReader:
    """A pipeline's text encoders, and what they made of the prompts so far; they are never trained."""

    def __init__(self, directory: Path, *, tokens: int | None, device: str | torch.device) -> None:
        model = read_pipeline(directory)
        absent = [name for name, part in _object(directory / INDEX).items() if isinstance(part, list)]
        parts: dict[str, Any] = {name: None for name in absent if name not in model.parts or name == "vae"}
        parts[model.family.folder] = outlined_denoiser(model)  # pipelines ask it for its sizes
        with _loading(model, "text encoders"):
            pipe = class_of(model.pipeline).from_pretrained(
                str(directory), **parts, use_safetensors=True, local_files_only=True
            )
        pipe.vae_scale_factor = model.pixels  # which it has of its VAE, where it is given one
        self._pipe, self._family, self._tokens, self._device = pipe, model.family, tokens, device
        self._read: dict[str, Condition] = {}

    def read(self, prompt: str) -> Condition:
        """Return what the denoiser is told of a prompt, on its device."""
        if prompt not in self._read:
            if len(self._read) >= MOST_PROMPTS:
                self._read.clear()
            with torch.no_grad():
                found = self._family.encode(self._pipe, prompt, self._tokens)
            self._read[prompt] = {name: each.to(self._device) for name, each in found.items()}
        return self._read[prompt]


MOST_PROMPTS: Final = 4096
"""Prompts that are remembered as text encoders read them."""


class Developer:
    """Makes pictures of latents: a pipeline's VAE, or without one the latents themselves, scaled up."""

    def __init__(self, directory: Path, *, device: str | torch.device) -> None:
        self._model, self._vae = read_pipeline(directory), None
        if self._model.vae is not None:
            with _loading(self._model, "vae"):
                vae = class_of(str(self._model.vae["_class_name"])).from_pretrained(
                    str(directory / "vae"), use_safetensors=True, local_files_only=True
                )
            self._vae = vae.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def develop(self, latents_NCYX: Tensor, states: Sequence[States], seeds: Sequence[int]) -> list[Picture]:
        """Make pictures, one at a time: none depends on its neighbours."""
        return [
            picture_of(self._pixels(each_CYX[None])[0], led, seed=seed)
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
        if hasattr(config, "z_dim"):  # Qwen's, which makes films, of one frame here
            return cast(Tensor, vae.decode(_restored(latents, config)[:, :, None], return_dict=False)[0][:, :, 0])
        latents = latents / config.scaling_factor
        if getattr(config, "latents_mean", None) is not None:
            latents = _restored(latents, config)
        return cast(Tensor, vae.decode(latents + (getattr(config, "shift_factor", None) or 0.0), return_dict=False)[0])


def _restored(latents_NCYX: Tensor, config: Any) -> Tensor:  # noqa: ANN401
    """Undo that latents were made to have mean 0 and deviation 1, channel by channel."""
    mean, std = (
        torch.tensor(each).view(1, -1, 1, 1).to(latents_NCYX) for each in (config.latents_mean, config.latents_std)
    )
    return latents_NCYX * std + mean


class FrozenParts:
    """Text encoders and VAE, which all versions of a policy share: loaded when they are first asked for.

    They are loaded again where another policy's are asked for, or after `clear` gave their memory back.
    """

    def __init__(self, *, device: str | torch.device) -> None:
        self._device = device
        self._of: object = None
        self._prompts: tuple[int | None, PromptReader] | None = None
        self._developer: Developer | None = None

    def prompts(self, directory: Path, *, tokens: int | None) -> PromptReader:
        """Return the text encoders of a directory, of whose longest so many tokens are read."""
        self._turn_to(directory)
        if self._prompts is None or self._prompts[0] != tokens:
            self._prompts = (tokens, PromptReader(directory, tokens=tokens, device=self._device))
        return self._prompts[1]

    def developer(self, directory: Path) -> Developer:
        """Return the VAE of a directory, or what stands for it."""
        self._turn_to(directory)
        self._developer = self._developer or Developer(directory, device=self._device)
        return self._developer

    def clear(self) -> None:
        """Let go of them."""
        self._of = self._prompts = self._developer = None

    def _turn_to(self, directory: Path) -> None:
        found = _frozen_files(directory)
        if found != self._of:
            self.clear()
            self._of = found


def _frozen_files(directory: Path) -> object:
    """Tell apart what directories have beside their denoisers' weights; versions of a policy have the same."""
    if not (directory / CONTENTS).is_file():
        return directory
    weights = f"{read_pipeline(directory).family.folder}/{WEIGHTS.partition('.')[0]}"
    files = Contents.model_validate_json((directory / CONTENTS).read_text()).files
    return {name: file.digest for name, file in files.items() if not name.startswith(weights)}


# ---- files
def copy_pipeline(source: Path, target: Path) -> None:
    """Copy what a directory consists of, and nothing that could run."""
    for path in kept_files(source):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        copyfile(source / path, target / path)


def link_beside_denoiser(parent: Path, directory: Path) -> None:
    """Have a directory with a new denoiser's weights be whole, without a copy of what stays where that is possible."""
    folder = read_pipeline(parent).family.folder
    for path in kept_files(parent):
        is_weights = path.parts[0] == folder and ".safetensors" in path.name
        if is_weights or (directory / path).exists():
            continue
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(parent / path, directory / path)
        except OSError:  # another file system
            copyfile(parent / path, directory / path)


def kept_files(directory: Path) -> list[Path]:
    """Name the files of a directory that belong to the policy, relative to it."""
    found = {path for pattern in FROZEN for path in directory.rglob(pattern) if path.is_file()}
    inside = sorted(path.relative_to(directory) for path in found)
    return [path for path in inside if path.name != CONTENTS and not any(part.startswith(".") for part in path.parts)]


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
