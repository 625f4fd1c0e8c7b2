"""What a model directory from elsewhere may not have, found before any library reads it. Torch-free.

A directory that a user names was often made by somebody else. It may hold links to files that are none of it, sizes
that no machine can build, and names of code: each is refused in one line. What is merely wrong is for others to say.
"""

import json
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from infra.errors import BadInput

MAX_BYTES: Final = {
    **dict.fromkeys(("config.json", "generation_config.json", "adapter_config.json"), 2**24),
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), 2**24),
    "chat_template.jinja": 2**20,
    "model.safetensors.index.json": 2**28,
    "tokenizer.json": 2**29,
}
"""The largest published tokenizers have 40 MB, the largest indices 10 MB."""
MAX_LAYERS: Final = 1024
"""The deepest published decoders have 126."""
MAX_EXPERTS: Final = 2**13
MAX_MODULES: Final = 2**17
"""Layers times experts, which some architectures build one by one; published models have up to 31,000."""
MAX_PARTS: Final = 2**16
"""Heads of a layer, labels of a classifier."""
MAX_SIZE: Final = 2**27
"""Of a vocabulary, a context or a side of a matrix; published contexts reach 10 million."""

_LAYERS: Final = re.compile(r"(^|_)(layers?|blocks|depths?|stages|attention_types)$")
_EXPERTS: Final = re.compile(r"(^|_)experts$")
_PARTS: Final = re.compile(r"(^|_)(heads?|groups?|labels)$")
_SIZES: Final = re.compile(r"(^|_)(size|dim|positions?|embeddings|embd|inner|ctx|rank|buckets)$")

_ATTENTION: Final = re.compile(r"_?attn_implementation(_internal)?")
_EXPERT_CODE: Final = re.compile(r"_?experts_implementation(_internal)?")
ATTENTION: Final = {"eager": "torch", "sdpa": "torch", "flex_attention": "torch", "flash_attention_2": "flash_attn"}
"""Ways to compute attention that are not fetched where their package is installed."""
EXPERTS: Final = ("eager", "batched_mm", "grouped_mm")
FETCHING: Final = ("eetq", "fbgemm_fp8", "fp8", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Quantization methods whose weights transformers multiplies by kernels from the hub, unless told to dequantize."""

ELSEWHERE: Final = {
    "kernel_config": "kernels are never fetched and run",
    "use_kernels": "kernels are never fetched and run",
    "transformers_weights": "expected the weights in model.safetensors, found another name for them",
    "configuration_files": "expected the configuration in config.json, found files to be read in its place",
}

_SNAPSHOTS: Final = "snapshots"
_HUB_NAME: Final = re.compile(r"[\w-]+/[\w.-]+")
_SHARED_BLOB: Final = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def no_directory(what: str, path: Path) -> BadInput:
    """What to say of a directory that is not there; a name like those of the Hugging Face hub is known as one."""
    found = f"{what} {path}: no such directory{'' if path.is_absolute() else f' (looked in {Path.cwd()})'}"
    folder = path.parent.parent
    was_relative = path.is_absolute() and folder.is_dir() and folder.parent != folder and not path.parent.exists()
    name = str(path.relative_to(folder) if was_relative else path)
    if not _HUB_NAME.fullmatch(name):
        return BadInput(found)
    return BadInput(f"{found}; nothing is downloaded by a run: `hf download {name} --local-dir {path}` fetches it")


def admit(directory: Path) -> None:
    """Refuse links out of a directory, sizes beyond all bounds, and names of code; what is not there is fine."""
    if not directory.is_dir():
        return
    _check_links(directory)
    for name, limit in MAX_BYTES.items():
        path = directory / name
        if path.is_file() and (found := path.stat().st_size) > limit:
            raise BadInput(f"{path}: expected at most {limit} bytes, found {found}")
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
                f"{directory}: expected a model or an adapter, found config.json and adapter_config.json: "
                "transformers would load something else than its weights; remove one of them"
            )
        _check_sizes(config, path)
        _check_code(config, path)


# ---- links


def _check_links(directory: Path) -> None:
    """Links may lead to what lies in the directory itself, or in the Hugging Face cache that it is a snapshot of."""
    root = directory.resolve()
    for folder in (root, root / "additional_chat_templates"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_symlink() and not _belongs(target := _resolved(path), root):
                raise BadInput(
                    f"{directory / path.relative_to(root)}: expected a file of the directory itself, found a symbolic "
                    f"link to {target}; put a copy in its place"
                )


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise BadInput(f"{path}: a symbolic link that leads nowhere: {error}") from error


def _belongs(target: Path, root: Path) -> bool:
    if target.is_relative_to(root):
        return True
    # …/models--ORG--NAME/snapshots/REVISION/FILE leads to …/models--ORG--NAME/blobs/ETAG, which may lead to
    # …/blobs/PREFIX/HASH, where repositories share what they have in common.
    snapshots = next((each for each in root.parents if each.name == _SNAPSHOTS), None)
    if snapshots is None or not snapshots.parent.name.startswith("models--"):
        return False
    shared = snapshots.parent.parent / "blobs"
    if target.is_relative_to(shared):
        return _SHARED_BLOB.fullmatch(target.relative_to(shared).as_posix()) is not None
    return target.parent == snapshots.parent / "blobs"


# ---- config.json


def _settings(value: object, at: str = "") -> Iterator[tuple[str, str, object]]:
    """Walk all settings, those in settings too: where each is, its name, its value."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield f"{at}{name}", name, part
            yield from _settings(part, f"{at}{name}.")
    elif isinstance(value, list):
        for part in value:
            yield at.removesuffix("."), at.removesuffix(".").rpartition(".")[2], part
            yield from _settings(part, at)


def _check_sizes(config: dict[str, object], path: Path) -> None:
    layers = experts = 1
    for at, name, value in _settings(config):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if _LAYERS.search(name):
            layers = max(layers, _bounded(value, MAX_LAYERS, at, path))
        elif _EXPERTS.search(name):
            experts = max(experts, _bounded(value, MAX_EXPERTS, at, path))
        elif _PARTS.search(name):
            _bounded(value, MAX_PARTS, at, path)
        elif _SIZES.search(name):
            _bounded(value, MAX_SIZE, at, path)
    if layers * experts > MAX_MODULES:
        raise BadInput(f"{path}: expected at most {MAX_MODULES} experts in all layers, found {layers} times {experts}")


def _bounded(value: float, limit: int, at: str, path: Path) -> int:
    if not value <= limit:
        shown = str(value)
        shown = shown if len(shown) < 20 else f"{shown[:12]}… ({len(shown)} digits)"
        raise BadInput(f"{path}: {at}: expected at most {limit}, found {shown}")
    return int(max(value, 1))


def _check_code(config: dict[str, object], path: Path) -> None:
    if config.get("auto_map"):
        _check_known(config.get("model_type"), path)
    for at, name, value in _settings(config):
        if _ATTENTION.fullmatch(name):
            _check_choice(value, [way for way, package in ATTENTION.items() if find_spec(package)], at, path)
        elif _EXPERT_CODE.fullmatch(name):
            _check_choice(value, EXPERTS, at, path)
        elif name == "quantization_config" and isinstance(value, dict):
            _check_quantization(value, at, path)
        elif value and name in ELSEWHERE:
            raise BadInput(f"{path}: {at}: {ELSEWHERE[name]}; remove it")


def _check_known(kind: object, path: Path) -> None:
    """Code that comes with a model which transformers knows is ignored; another model is nothing without its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if kind not in CONFIG_MAPPING_NAMES:
        raise BadInput(
            f"{path}: auto_map: expected a model that transformers itself knows, found model_type {str(kind)[:80]!r} "
            "with code of its own, which is never run"
        )


def _check_quantization(settings: dict[str, object], at: str, path: Path) -> None:
    method = settings.get("quant_method")
    if method in FETCHING and settings.get("dequantize") is not True:
        raise BadInput(
            f"{path}: {at}.quant_method {method!r}: transformers would fetch and run kernels for it; add "
            f'"dequantize": true to {at}, or take the weights that are not quantized'
        )


def _check_choice(value: object, allowed: Sequence[str], at: str, path: Path) -> None:
    """Refuse what is none of the names that transformers itself comes with; a table has one for each part."""
    for each in value.values() if isinstance(value, dict) else (value,):
        if each is not None and each not in allowed:
            raise BadInput(
                f"{path}: {at}: expected one of {', '.join(allowed)}, found {str(each)[:80]!r}: kernels are never "
                "fetched and run; remove it"
            )
