"""Comparison of a model directory's safetensors files with its config.json.

Messages name the file, the weight and both sizes, and tell the user what to do. transformers only prints a table, and
recommends an option that users of Rheostat cannot set.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.user_files import FETCH_LFS, is_lfs_pointer

FLOATS: Final = ("F64", "F32", "BF16", "F16")
"""Floating-point dtypes in which weights may be stored, by their names in safetensors files."""
SAME_CHECKPOINT: Final = "Take config.json and all safetensors files from the same checkpoint"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """File and dtype in which one weight of a model is stored."""

    file: str
    """Name of the file in the model directory that contains the weight."""
    dtype: str
    """Dtype of the weight by its name in safetensors files, such as `BF16`."""
    shape: tuple[int, ...]


def read_stored_weights(directory: Path, *, what: str) -> dict[str, StoredWeight]:
    """Read the headers of all safetensors files with a model's weights. Return the file and dtype of each weight by
    name. Raises BadInput if a file is truncated or is not a safetensors file. The message begins with `what`, the kind
    of the model."""
    index, where = directory / "model.safetensors.index.json", f"{what} {directory}"
    try:
        names = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"{where}: {index.name} must contain a JSON object with the key weight_map. {SAME_CHECKPOINT}"
        ) from None
    headers = (read_header(directory / name, where=where) for name in sorted(set(map(str, names))))
    return {name: weight for header in headers for name, weight in header.items()}


def read_header(path: Path, *, where: str) -> dict[str, StoredWeight]:
    """Read the header of a safetensors file. Return the file and dtype of each weight by name. Raises BadInput if the
    file does not exist or is damaged. The message begins with `where`."""
    if not path.is_file():
        raise BadInput(f"{where}: the file {path.name} does not exist. Copy or download all files of the model")
    try:
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 -- it is no mapping
            return {n: StoredWeight(path.name, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        damage = f"is damaged or incomplete ({error}). Copy or download the file again"
        raise BadInput(f"{where}: {path.name} {FETCH_LFS if is_lfs_pointer(path) else damage}") from error


def check_loaded_weights(
    model: PreTrainedModel, loading: Mapping[str, Any], stored: Mapping[str, StoredWeight], *, where: str
) -> None:
    """Raise BadInput if a weight is missing in the files, or is stored with another size or as integers.

    `loading` is the report that transformers returns when it loads a model. The message begins with `where`.
    """
    if sizes := sorted(loading["mismatched_keys"]):
        name, found, expected = sizes[0]
        more = (
            f". {format_count(len(sizes) - 1, 'more weight has', 'more weights have')} a wrong size"
            if len(sizes) > 1
            else ""
        )
        raise BadInput(
            f"{where}: the weight {name} in {_find_file(name, stored)} has the size {_size(found)}, but config.json "
            f"requires {_size(expected)}{more}. {SAME_CHECKPOINT}"
        )
    if missing := sorted(loading["missing_keys"]):
        files = ", ".join(sorted({each.file for each in stored.values()}))
        more = f" and {format_count(len(missing) - 1, 'more weight')}" if len(missing) > 1 else ""
        size = dict(model.state_dict())[missing[0]].shape if missing[0] in model.state_dict() else None
        wanted = f" of size {_size(size)}" if size is not None else ""
        raise BadInput(
            f"{where}: {files} does not contain the weight {missing[0]}{wanted}{more}, which config.json requires. "
            f"{SAME_CHECKPOINT}"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in sorted(stored.items()):
        is_weight = name in parameters or name.endswith("weight")  # others are buffers, such as masks
        if is_weight and weight.dtype not in FLOATS and not is_quantized(Path(model.name_or_path)):
            raise BadInput(
                f"{where}: {weight.file} stores {name} as {weight.dtype}, but weights must have one of the types "
                f"{', '.join(FLOATS)}. Use the checkpoint that is not quantized"
            )


def _find_file(name: str, stored: Mapping[str, StoredWeight]) -> str:
    """Return the name of the file that contains a weight. If transformers has renamed the weight, return the names of
    all files."""
    return stored[name].file if name in stored else ", ".join(sorted({each.file for each in stored.values()}))


def _size(shape: object) -> str:
    return " x ".join(map(str, tuple(shape))) or "one number"  # type: ignore[arg-type]


def is_quantized(directory: Path) -> bool:
    """Return whether config.json describes a quantization of the weights, which transformers undoes when it loads
    them."""
    return "quantization_config" in json.loads((directory / "config.json").read_text())
