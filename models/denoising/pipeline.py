"""Text-to-image policies as diffusers directories: validation, loading of their parts, and copying.

A directory has a denoiser, which is trained, and frozen parts: a scheduler, text encoders with their tokenizers and
usually a VAE. Nothing is downloaded, and no code from a directory is run.
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
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import CONTENTS
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.denoising.families import DenoiserFamily, PromptLimit, diffusers_class, process_tree
from rheostat.models.denoising.samplers import NoiseSchedule, noisy_steps
from rheostat.models.denoising.schedulers import check_scheduler, schedule_of
from rheostat.models.modeling.parameter_storage import ParameterStorage
from rheostat.models.modeling.policy import lock_model_construction
from rheostat.models.modeling.weight_files import read_header

INDEX: Final = "model_index.json"
WEIGHTS: Final = "diffusion_pytorch_model.safetensors"
FROZEN: Final = ("*.json", "*.txt", "*.model", "*.safetensors")
"""Patterns of the files copied from a pipeline: configuration, tokenizers and weights, but no code and no pickles."""
PIXELS_PER_LATENT: Final = 8
"""Side length, in pixels, of the square that one latent covers if a pipeline has no VAE, as in diffusers."""
_UNUSED: Final = ("safety_checker", "feature_extractor", "image_encoder", "watermark")
"""Components of diffusers pipelines that Rheostat does not load, because they are not needed to generate images."""
_LIBRARIES: Final = ("diffusers", "transformers")
_LOADING: Final = (ValueError, KeyError, TypeError, OSError, RuntimeError, AttributeError, ImportError, SafetensorError)
"""Exceptions that the libraries raise if the files of a pipeline component cannot be loaded."""


def is_pipeline(directory: Path) -> bool:
    """Return whether a directory contains a pipeline in diffusers format."""
    return (directory / INDEX).is_file()


@dataclass(frozen=True, slots=True)
class PipelineOutline:
    """Description of a text-to-image pipeline, read from the configuration files in its directory."""

    directory: Path
    pipeline: str
    family: DenoiserFamily
    denoiser: Mapping[str, Any]
    """Contents of the denoiser's config.json."""
    scheduler: Mapping[str, Any]
    vae: Mapping[str, Any] | None
    """Contents of the VAE's config.json, or None if the pipeline has no VAE, because the denoiser works on pixels."""
    parts: tuple[str, ...]
    """Names of the components in use, such as `text_encoder`. Each is a folder in the pipeline's directory."""

    @property
    def where(self) -> str:
        """Name of the policy in error messages: the word "policy" with the directory."""
        return f"policy {self.directory}"

    @property
    def pixels(self) -> int:
        """Side length, in pixels, of the square that one latent covers."""
        if self.vae is None:
            return PIXELS_PER_LATENT
        halvings = self.vae.get("temperal_downsample") or self.vae["block_out_channels"][1:]
        return int(2 ** len(halvings))

    @property
    def limits(self) -> list[PromptLimit]:
        """Maximum prompt lengths of the text encoders in this pipeline, the highest first."""
        return [each for each in self.family.limits if {each.tokenizer, each.encoder} <= {*self.parts}]

    def shape(self, config: DenoisingConfig) -> tuple[int, int, int]:
        """Return channels, height and width of a state. Raises BadInput if the configured image size is not
        possible."""
        patch = self.family.patch(self.denoiser)
        side, unit = config.side or self.family.side(self.denoiser) * self.pixels, self.pixels * patch
        if side % unit:
            raise BadInput(
                f"rollout.denoising.side is {side}, but it must be a multiple of {unit} pixels for "
                f"{self.family.denoiser}. Set it to {max(unit, round(side / unit) * unit)}."
            )
        max_patches = self.denoiser.get("pos_embed_max_size")
        if max_patches and side > max_patches * unit:
            name = self.family.denoiser
            raise BadInput(
                f"rollout.denoising.side is {side}, but {name} allows at most {max_patches * unit} pixels. Lower it."
            )
        return self.family.channels(self.denoiser), side // self.pixels, side // self.pixels

    def tokens(self, config: DenoisingConfig) -> int:
        """Return the number of tokens that the denoiser reads for one image. A UNet reads one token per latent."""
        return self.family.tokens(self.denoiser, self.shape(config)[1])

    def schedule(self, config: DenoisingConfig) -> NoiseSchedule:
        """Return the noise level of each denoising step. Raises BadInput if the sampler does not support the model."""
        return schedule_of(self.scheduler, self.family, config, tokens=self.tokens(config))

    def check(self, config: DenoisingConfig) -> int:
        """Check the denoising settings, and return the number of tokens that training reads for one image.

        Raises BadInput if the model cannot generate images with these settings, or if the configured window of steps
        includes steps with too little noise to be trained.
        """
        noisy, window = noisy_steps(config.sampler, self.schedule(config)), config.window
        if not noisy:
            raise BadInput(f"rollout.denoising.steps is {config.steps}, at which no step has enough noise. Raise it.")
        if window is not None and window.last + window.size - 1 > noisy[-1]:
            raise BadInput(
                f"rollout.denoising.window.last is {window.last} and its size {window.size}, but step {noisy[-1]} is "
                f"the last with enough noise. Set window.last to {max(0, noisy[-1] + 1 - window.size)} or lower."
            )
        return self.tokens(config) * (len(noisy) if window is None else window.size)


def read_pipeline(directory: Path) -> PipelineOutline:
    """Read the configuration files of a diffusers pipeline. Raises BadInput if Rheostat cannot train this pipeline."""
    where = f"policy {directory}"
    if not directory.is_dir():
        raise BadInput(f"{where}: there is no such directory. Set the path of a model directory.")
    if not is_pipeline(directory):
        raise BadInput(f"{where}: there is no {INDEX} of diffusers. Language models need policy.kind = 'directory'.")
    index = _read_object(directory / INDEX)
    pipeline = index.get("_class_name")
    folder = "unet" if "unet" in index else "transformer"
    part = index.get(folder)
    denoiser = part[1] if isinstance(part, list) and len(part) == 2 else None
    try:
        family = process_tree(str(pipeline), str(denoiser))
        config = _read_object(directory / folder / "config.json")
        family.check(config)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    scheduler = _read_object(directory / "scheduler" / "scheduler_config.json")
    check_scheduler(scheduler, family, where=where)
    parts = _parts(index, where=where)
    vae = _read_object(directory / "vae" / "config.json") if "vae" in parts else None
    model = PipelineOutline(directory, str(pipeline), family, config, scheduler, vae, parts)
    if vae is not None and (latents := vae.get("z_dim") or vae.get("latent_channels")) != family.channels(config):
        raise BadInput(f"{where}: the VAE has {latents} latent channels, but the {folder} {family.channels(config)}")
    return model


def _parts(index: Mapping[str, Any], *, where: str) -> tuple[str, ...]:
    """Return the names of a pipeline's components. Raises BadInput if a class is not from diffusers or transformers."""
    parts = {name: part for name, part in index.items() if isinstance(part, list) and name not in _UNUSED}
    for name, part in parts.items():
        if len(part) != 2 or part[0] not in (None, *_LIBRARIES):
            raise BadInput(f"{where}: {name} in {INDEX} is {part!r}, not a class of {' or '.join(_LIBRARIES)}")
    return tuple(name for name, part in parts.items() if part[0] is not None)


# ---- parts
@contextmanager
def _loading(model: PipelineOutline, part: str) -> Iterator[None]:
    """Run the block, which loads one component of a pipeline, under a lock. Errors are raised as BadInput."""
    try:
        with lock_model_construction():
            yield
    except _LOADING as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(f"{model.where}: the {part} cannot be loaded: {first}. Copy the model again.") from error


def load_denoiser(
    directory: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    storage: ParameterStorage | None = None,
) -> nn.Module:
    """Load the denoiser, the only trained component, in `dtype`. If `storage` is given, parameters are stored as it
    describes, and buffers in float32. Raises BadInput if the weights cannot be loaded."""
    model = read_pipeline(directory)
    files = _weights_in(directory / model.family.folder, where=model.where)
    with _loading(model, model.family.folder):
        denoiser = _read_denoiser(model, files, storage or ParameterStorage(dtype, torch.device(device)))
    return denoiser if storage is not None else denoiser.to(dtype=dtype)


def _read_denoiser(model: PipelineOutline, files: Sequence[Path], storage: ParameterStorage) -> nn.Module:
    """Build the denoiser, and store one parameter after another. diffusers would load all of them at once."""
    with init_empty_weights(include_buffers=False):
        denoiser: nn.Module = diffusers_class(model.family.denoiser).from_config(dict(model.denoiser))
    buffers = dict(denoiser.named_buffers())
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                if name in buffers:
                    buffers[name].copy_(file.get_tensor(name))
                else:
                    _set_parameter(denoiser, name, file.get_tensor(name), storage)
    if missing := [name for name, each in denoiser.named_parameters() if each.is_meta]:
        raise ValueError(f"the weight {missing[0]} is missing")
    return storage.finish(denoiser.eval())


def _set_parameter(denoiser: nn.Module, name: str, values: torch.Tensor, storage: ParameterStorage) -> None:
    """Replace a parameter on the meta device by a parameter with values. `values` may be mapped from a file."""
    module, _, last = name.rpartition(".")
    owner = denoiser.get_submodule(module)
    if values.shape != owner.get_parameter(last).shape:
        raise ValueError(f"the weight {name} has the shape {tuple(values.shape)}")
    parameter = nn.Parameter(values.to(device=storage.device, dtype=storage.dtype, copy=True))
    owner.register_parameter(last, parameter)
    storage.store(parameter)


def load_part(model: PipelineOutline, part: str) -> Any:  # noqa: ANN401 -- what model_index.json says
    """Load a component with the class that model_index.json names. Raises BadInput if it cannot be loaded."""
    library, kind = _read_object(model.directory / INDEX)[part]
    with _loading(model, part):
        return getattr(import_module(library), kind).from_pretrained(str(model.directory / part), local_files_only=True)


def load_text_encoders(model: PipelineOutline) -> Any:  # noqa: ANN401 -- diffusers has few types
    """Load a pipeline with its text encoders and tokenizers, without VAE and denoiser. Raises BadInput if a component
    cannot be loaded."""
    named = [name for name, part in _read_object(model.directory / INDEX).items() if isinstance(part, list)]
    parts: dict[str, Any] = {name: None for name in named if name not in model.parts or name == "vae"}
    parts[model.family.folder] = build_denoiser_outline(model)  # pipelines read sizes from its configuration
    with _loading(model, "text encoders"):
        pipe = diffusers_class(model.pipeline).from_pretrained(
            str(model.directory), **parts, use_safetensors=True, local_files_only=True
        )
    pipe.vae_scale_factor = model.pixels  # a pipeline with a VAE reads this from the VAE
    return pipe


def load_vae(model: PipelineOutline) -> Any | None:  # noqa: ANN401
    """Load the VAE of a pipeline, or return None if the pipeline has none. Raises BadInput if it cannot be loaded."""
    if model.vae is None:
        return None
    with _loading(model, "vae"):
        return diffusers_class(str(model.vae["_class_name"])).from_pretrained(
            str(model.directory / "vae"), use_safetensors=True, local_files_only=True
        )


def build_denoiser_outline(model: PipelineOutline) -> nn.Module:
    """Return the denoiser on the meta device: it has names and shapes of weights, but allocates no memory."""
    kind = diffusers_class(model.family.denoiser)
    with lock_model_construction(), torch.device("meta"):
        return cast(nn.Module, kind.from_config(dict(model.denoiser)))


def check_weights(model: PipelineOutline) -> int:
    """Compare the weight files of the denoiser with its configuration, and return the number of parameters.

    Raises BadInput if names or shapes differ, or if a component's weights are not stored as safetensors.
    """
    required = {name: tuple(each.shape) for name, each in build_denoiser_outline(model).state_dict().items()}
    folder = model.directory / model.family.folder
    for part in model.parts:
        has_weights = part == model.family.folder or part == "vae" or part.startswith("text_encoder")
        if has_weights and not any((model.directory / part).glob("*.safetensors")):
            raise BadInput(f"{model.where}: {part} contains no safetensors. Pickled weights are never loaded.")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weights_in(folder, where=model.where):
        header = read_header(path, where=f"{model.where}: {model.family.folder}")
        shapes |= {name: weight.shape for name, weight in header.items()}
    wrong = [name for name in required if shapes.get(name) != required[name]]
    if wrong:
        raise BadInput(
            f"{model.where}: {model.family.folder}: weights with another shape than config.json "
            f"requires. {wrong[0]} must have {required[wrong[0]]}, but has {shapes.get(wrong[0])}."
        )
    return sum(int(np.prod(shape)) for shape in required.values())


def _weights_in(folder: Path, *, where: str) -> list[Path]:
    """Return the weight files in a folder, without variants such as fp16. Raises BadInput if a file is missing."""
    index = folder / f"{WEIGHTS}.index.json"
    named = set(_read_object(index).get("weight_map", {}).values()) if index.is_file() else {WEIGHTS}
    if absent := sorted(name for name in named if not (folder / name).is_file()):
        raise BadInput(f"{where}: the file {absent[0]} is missing in the folder {folder.name}. Copy the model again.")
    return [folder / name for name in sorted(named)]


# ---- files
def copy_pipeline(source: Path, target: Path) -> None:
    """Copy the configuration, tokenizers and weights of a pipeline, but no files that could be run as code."""
    for path in list_policy_files(source):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        copyfile(source / path, target / path)


def link_frozen_parts(parent: Path, directory: Path) -> list[str]:
    """Add the frozen components in `parent` to a new version's directory, as hard links or else as copies. Return the
    relative paths of the hard links."""
    folder, linked = read_pipeline(parent).family.folder, list[str]()
    for path in list_policy_files(parent):
        is_weights = path.parts[0] == folder and ".safetensors" in path.name
        if is_weights or (directory / path).exists():
            continue
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(parent / path, directory / path)
            linked.append(path.as_posix())
        except OSError:  # another file system
            copyfile(parent / path, directory / path)
    return linked


def list_policy_files(directory: Path) -> list[Path]:
    """Return the paths of the configuration, tokenizer and weight files of a policy, relative to its directory."""
    files = {path for pattern in FROZEN for path in directory.rglob(pattern) if path.is_file()}
    inside = sorted(path.relative_to(directory) for path in files)
    return [path for path in inside if path.name != CONTENTS and not any(part.startswith(".") for part in path.parts)]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: the file cannot be read as JSON: {error}. Copy or download the file again.") from error
    if not isinstance(content, dict):
        raise BadInput(f"{path}: the file must contain a JSON object, but contains a {type(content).__name__}")
    return content
