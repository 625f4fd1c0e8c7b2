"""Safety checks of a model directory from elsewhere, done before any library reads the directory. Torch-free.

A model directory often comes from a third party. It may contain links to files outside, sizes that no machine can
allocate, and names of code to run. Each of these is rejected with a one-line error. Other errors are left to the
libraries that read the directory.
"""

import json
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rheostat.infra.errors import BadInput
from rheostat.infra.user_files import FETCH_LFS, is_lfs_pointer

MAX_BYTES: Final = {
    **dict.fromkeys(("config.json", "generation_config.json", "adapter_config.json"), 2**24),
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), 2**24),
    "chat_template.jinja": 2**20,
    "model.safetensors.index.json": 2**28,
    "tokenizer.json": 2**29,
}
"""Maximum size in bytes of each file of an untrusted model directory. The largest published tokenizers have 40 MB, the
largest indices 10 MB."""
MAX_LAYERS: Final = 1024
"""Maximum number of layers that an untrusted config.json may state. The deepest published decoders have 126."""
MAX_EXPERTS: Final = 2**13
"""Maximum number of experts per layer that an untrusted config.json may state."""
MAX_MODULES: Final = 2**17
"""Maximum of layers times experts, because some architectures build every expert as a separate module. Published models
have up to 31,000."""
MAX_PARTS: Final = 2**16
"""Maximum number of attention heads of a layer, and of labels of a classifier, that an untrusted config.json may
state."""
MAX_SIZE: Final = 2**27
"""Maximum size of a vocabulary, a context or one dimension of a matrix that an untrusted config.json may state.
Published contexts reach 10 million."""

_LAYERS: Final = re.compile(r"(^|_)(layers?|blocks|depths?|stages|attention_types)$")
_EXPERTS: Final = re.compile(r"(^|_)experts$")
_PARTS: Final = re.compile(r"(^|_)(heads?|groups?|labels)$")
_SIZES: Final = re.compile(r"(^|_)(size|dim|positions?|embeddings|embd|inner|ctx|rank|buckets)$")

_ATTENTION: Final = re.compile(r"_?attn_implementation(_internal)?")
_EXPERT_CODE: Final = re.compile(r"_?experts_implementation(_internal)?")
ATTENTION: Final = {"eager": "torch", "sdpa": "torch", "flex_attention": "torch", "flash_attention_2": "flash_attn"}
"""Attention implementations that transformers runs without downloading code, and the package that each needs."""
EXPERTS: Final = ("eager", "batched_mm", "grouped_mm")
"""Implementations of mixture-of-experts layers that transformers runs without downloading code."""
FETCHING: Final = ("eetq", "fbgemm_fp8", "fp8", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Quantization methods for which transformers downloads kernels from the Hugging Face Hub, unless `dequantize` is
set."""

ELSEWHERE: Final = {
    "kernel_config": "kernels are never downloaded and run",
    "use_kernels": "kernels are never downloaded and run",
    "transformers_weights": "the weights must be in model.safetensors, but this setting names another file",
    "configuration_files": "the configuration must be in config.json, but this setting names other files",
}
"""Settings of config.json that are rejected if they are set, with the reason."""

_PRECISION: Final = re.compile(r"b?float16|float(32|64)?|float8_\w+|u?int\d+|half|double")
_SNAPSHOTS: Final = "snapshots"
_SHARED_BLOB: Final = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def missing_directory_error(what: str, path: Path) -> BadInput:
    """Return the error for a missing model directory. `what` is the kind of the model."""
    return BadInput(f"{what} {path}: no such directory{'' if path.is_absolute() else f' (looked in {Path.cwd()})'}")


def check_untrusted_files(directory: Path) -> None:
    """Raise BadInput if a model directory from a third party contains links to files outside it, Git LFS pointers,
    excessive sizes, or names of code. A missing directory is accepted."""
    if not directory.is_dir():
        return
    _check_links(directory)
    for name, limit in MAX_BYTES.items():
        _check_file(directory / name, limit)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        _check_file(path, MAX_BYTES["chat_template.jinja"])
    path = directory / "config.json"
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict):
        if (directory / "adapter_config.json").exists():
            raise BadInput(
                f"{directory}: the directory has both config.json and adapter_config.json, so transformers would not "
                "load the model's own weights. Remove one of the two files."
            )
        _check_sizes(config, path)
        _check_code(config, path)


# ---- links


def _check_file(path: Path, limit: int) -> None:
    """Raise BadInput if a file has more than `limit` bytes or is a Git LFS pointer. A missing file is accepted."""
    if not path.is_file():
        return
    if (size := path.stat().st_size) > limit:
        raise BadInput(f"{path}: the file has {size} bytes, but at most {limit} bytes are read. Use another model")
    if is_lfs_pointer(path):
        raise BadInput(f"{path} {FETCH_LFS}.")


def _check_links(directory: Path) -> None:
    """Raise BadInput if the directory contains a link to a file outside the directory and outside the Hugging Face
    cache to which the directory belongs."""
    root = directory.resolve()
    for folder in (root, root / "additional_chat_templates"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_symlink() and not _is_within(target := _resolve_link(path), root):
                raise BadInput(
                    f"{directory / path.relative_to(root)} is a symbolic link to {target}, which is outside of the "
                    "model directory. Replace the link by a copy of the file."
                )


def _resolve_link(path: Path) -> Path:
    """Return the target of a link. Raises BadInput if the target does not exist."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise BadInput(
            f"{path}: the symbolic link cannot be resolved: {error}. Replace the link by a copy of the file"
        ) from error


def _is_within(target: Path, root: Path) -> bool:
    """Return whether a link target is inside the directory `root` or the Hugging Face cache to which the directory
    belongs."""
    if target.is_relative_to(root):
        return True
    # …/models--ORG--NAME/snapshots/REVISION/FILE links to …/models--ORG--NAME/blobs/ETAG, which may link to
    # …/blobs/PREFIX/HASH, where repositories share common files.
    snapshots = next((each for each in root.parents if each.name == _SNAPSHOTS), None)
    if snapshots is None or not snapshots.parent.name.startswith("models--"):
        return False
    shared = snapshots.parent.parent / "blobs"
    if target.is_relative_to(shared):
        return _SHARED_BLOB.fullmatch(target.relative_to(shared).as_posix()) is not None
    return target.parent == snapshots.parent / "blobs"


# ---- config.json


def _iterate_settings(value: object, at: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield the path, name and value of each setting, including nested ones. `at` is the path of `value` itself."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield f"{at}{name}", name, part
            yield from _iterate_settings(part, f"{at}{name}.")
    elif isinstance(value, list):
        for part in value:
            yield at.removesuffix("."), at.removesuffix(".").rpartition(".")[2], part
            yield from _iterate_settings(part, at)


def _check_sizes(config: dict[str, object], path: Path) -> None:
    """Raise BadInput if a size in config.json exceeds its limit."""
    layers = experts = 1
    for at, name, value in _iterate_settings(config):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if _LAYERS.search(name):
            layers = max(layers, _require_at_most(value, MAX_LAYERS, at, path))
        elif _EXPERTS.search(name):
            experts = max(experts, _require_at_most(value, MAX_EXPERTS, at, path))
        elif _PARTS.search(name):
            _require_at_most(value, MAX_PARTS, at, path)
        elif _SIZES.search(name):
            _require_at_most(value, MAX_SIZE, at, path)
    if layers * experts > MAX_MODULES:
        raise BadInput(
            f"{path}: the model has {layers} layers x {experts} experts, but at most {MAX_MODULES} experts in total "
            "are allowed. Use a smaller model"
        )


def _require_at_most(value: float, limit: int, at: str, path: Path) -> int:
    """Return a size as an integer, at least 1. Raises BadInput if it exceeds the limit. `at` is the path of the setting
    in messages."""
    if not value <= limit:
        digits = str(value)
        digits = digits if len(digits) < 20 else f"{digits[:12]}… ({len(digits)} digits)"
        raise BadInput(f"{path}: {at} is {digits}, but at most {limit} is allowed. Use a smaller model")
    return int(max(value, 1))


def _check_code(config: dict[str, object], path: Path) -> None:
    """Raise BadInput if config.json names code that would be downloaded and run."""
    if config.get("auto_map"):
        _check_known(config.get("model_type"), path)
    for at, name, value in _iterate_settings(config):
        if _ATTENTION.fullmatch(name):
            _check_choice(value, [way for way, package in ATTENTION.items() if find_spec(package)], at, path)
        elif _EXPERT_CODE.fullmatch(name):
            _check_choice(value, EXPERTS, at, path)
        elif name in ("dtype", "torch_dtype") and isinstance(value, str) and not _PRECISION.fullmatch(value):
            raise BadInput(
                f"{path}: {at} is {value[:80]!r}, but it must be a precision such as float32, bfloat16 or float16. "
                "Write the precision of the weights, or remove the setting."
            )
        elif name == "quantization_config" and isinstance(value, dict):
            _check_quantization(value, at, path)
        elif value and name in ELSEWHERE:
            raise BadInput(f"{path}: {at}: {ELSEWHERE[name]}. Remove the setting.")


def _check_known(kind: object, path: Path) -> None:
    """Raise BadInput if transformers does not know this model type, which would then need its own code. Code that
    accompanies a known model is ignored."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if kind not in CONFIG_MAPPING_NAMES:
        raise BadInput(
            f"{path}: auto_map: model_type {str(kind)[:80]!r} needs code from the model directory, which is never run. "
            "Use a model that transformers supports."
        )


def _check_quantization(settings: dict[str, object], at: str, path: Path) -> None:
    """Raise BadInput if the quantization settings would make transformers download kernels. `at` is the path of the
    settings in config.json."""
    method = settings.get("quant_method")
    if method in FETCHING and settings.get("dequantize") is not True:
        raise BadInput(
            f"{path}: {at}.quant_method {method!r}: transformers would download and run kernels for this method. Add "
            f'"dequantize": true to {at}, or use the unquantized weights.'
        )


def _check_choice(value: object, allowed: Sequence[str], at: str, path: Path) -> None:
    """Raise BadInput if the value of a setting is not one of the allowed names. If the value is an object, it contains
    one name for each part of the model. `at` is the path of the setting in messages."""
    for each in value.values() if isinstance(value, dict) else (value,):
        if each is not None and each not in allowed:
            raise BadInput(
                f"{path}: {at} is {str(each)[:80]!r}, which would download and run a kernel. Use one of "
                f"{', '.join(allowed)}, or remove the setting."
            )
