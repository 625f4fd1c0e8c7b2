"""Safetensors files written as a stream, so that their digest is known as soon as the last byte is written.

The safetensors library only writes to paths or into memory. The bytes written here are identical to those of the
library.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import torch
import transformers.modeling_utils
from torch import Tensor
from transformers import PreTrainedModel

from infra.store.bundles import BundledFile, write_hashed
from models.modeling.lazy_tensors import compute_values

_NAMES: Final = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that safetensors files use for torch dtypes, in the order in which tensors of these dtypes are stored in a
file."""

DTYPES: Final = {text: dtype for dtype, text in _NAMES.items()}
"""Torch dtypes, keyed by their names in safetensors files."""

_SAVING = threading.Lock()


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """Dtype and shape of a stored tensor, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None
) -> BundledFile:
    """Write tensors as one safetensors file, and return its size and digest."""
    return write_hashed(path, tensor_pieces(tensors, metadata=metadata))


def save_pretrained(
    model: PreTrainedModel, directory: Path, *, state: Mapping[str, Tensor] | None = None
) -> dict[str, BundledFile]:
    """Write a model's configuration and weights into a directory, and return the size and digest of each weight file by
    name. `state` contains the weights if those of the model are sharded."""
    files: dict[str, BundledFile] = {}
    with _replace_writer(directory, files):
        model.save_pretrained(directory, state_dict=None if state is None else dict(state))
    return files


def tensor_pieces(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with these tensors, piece by piece. Tensors on an accelerator are copied to
    the CPU one at a time."""
    outlines = {name: TensorOutline(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return streamed_pieces(outlines, lambda name: compute_values(tensors[name]), metadata=metadata)


def streamed_pieces(
    outlines: Mapping[str, TensorOutline],
    make: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file piece by piece. `outlines` gives the dtype and shape of each tensor, and
    `make` is called with a tensor's name to compute the tensor when it is written."""
    order = list(_NAMES)
    names = sorted(outlines, key=lambda name: (order.index(outlines[name].dtype), name.encode()))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        outline = outlines[name]
        start, end = end, end + prod(outline.shape) * outline.dtype.itemsize
        header[name] = {"dtype": _NAMES[outline.dtype], "shape": [*outline.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        tensor = make(name)
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _replace_writer(directory: Path, files: dict[str, BundledFile]) -> Iterator[None]:
    """Run the block with transformers writing a directory's weight files through `save_tensors`, which computes
    digests. Descriptions of the written files are added to `files`.

    transformers has no other hook for this. If a version of transformers writes files by another function, the digests
    are computed later, from the written files.
    """

    def save(tensors: dict[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
        if Path(path).parent == directory:
            files[Path(path).name] = save_tensors(tensors, Path(path), metadata=metadata)
        else:  # from another thread
            original(tensors, path, metadata)

    with _SAVING:
        original = transformers.modeling_utils.safe_save_file
        transformers.modeling_utils.safe_save_file = save
        try:
            yield
        finally:
            transformers.modeling_utils.safe_save_file = original
