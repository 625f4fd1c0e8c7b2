"""Safetensors files written as a stream, so that their digest is known as soon as the last byte is written. Tensors on
a GPU are copied, written and hashed in chunks, so that no copy of the whole model is needed in host memory.

The safetensors library only writes to paths or into memory. The bytes written here are identical to those of the
library.
"""

import json
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Final

import torch
import transformers.modeling_utils
from torch import Tensor
from transformers import PreTrainedModel

from rheostat.infra.store.bundles import BundledFile
from rheostat.infra.store.file_writer import FILES_AT_ONCE, Piece, write_files, write_hashed
from rheostat.models.modeling.lazy_tensors import compute_values

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

CHUNK_BYTES: Final = 64 << 20
"""Maximum size in bytes of the pieces in which tensors are copied, written and hashed. It is a power of two, because
PyTorch rounds the sizes of pinned buffers up to one."""

MAX_FILE_SIZE: Final = "50GB"
"""Maximum size of a weight file of a policy, in the notation of transformers. The digest of a policy depends on it."""

_SAVING = threading.Lock()


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """Dtype and shape of a stored tensor, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Safetensors file that is not written yet: its tensors and metadata."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class FileShare:
    """Share of a rank in writing the weight files of a model. The files do not depend on the number of ranks."""

    rank: int = 0
    """Index of this rank."""
    writers: int = 1
    """Number of ranks among which the files are divided. Later ranks write no file."""
    gathers: bool = False
    """Whether the ranks gather the weights together, so that every rank must produce the tensors of all files."""

    def assign(self, paths: Collection[Path]) -> dict[Path, int]:
        """Return the index of the rank that writes each file. Consecutive ranks are usually on the same machine, so few
        files are spread over all ranks. The result begins with the first file of each rank."""
        shares: dict[int, list[Path]] = {}
        for place, path in enumerate(sorted(paths)):
            shares.setdefault(place * self.writers // len(paths), []).append(path)
        rounds = zip_longest(*([(path, writer) for path in share] for writer, share in shares.items()))
        return dict(each for files in rounds for each in files if each is not None)


WHOLE: Final = FileShare()
"""Share of a process that writes all files."""


def write_share(
    files: Mapping[Path, TensorFile], *, share: FileShare, on_progress: Callable[[], None]
) -> dict[Path, BundledFile]:
    """Write this rank's share of safetensors files with these tensors, and return the size and digest of each written
    file. Collective if `share.gathers`: then every rank must call this with the same tensors."""
    writers = share.assign(files)
    others = {path for path, writer in writers.items() if writer != share.rank}
    return write_files(
        {
            path: tensor_pieces(files[path].tensors, metadata=files[path].metadata, writer=writer)
            for path, writer in writers.items()
            if share.gathers or path not in others
        },
        skipped=others,
        at_once=FILES_AT_ONCE * (share.writers if share.gathers else 1),
        on_progress=on_progress,
    )


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None
) -> BundledFile:
    """Write tensors as one safetensors file, and return its size and digest."""
    return write_hashed(path, tensor_pieces(tensors, metadata=metadata))


def save_pretrained(
    model: PreTrainedModel,
    directory: Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    share: FileShare = WHOLE,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, BundledFile]:
    """Write a model's configuration and this rank's share of the weight files into a directory. Return the size and
    digest of each written weight file by name. `state` contains the weights if those of the model are sharded.
    `on_progress` is called after each chunk of the weights."""
    files: dict[Path, TensorFile] = {}
    with _replace_writer(model, directory, files):
        weights = None if state is None else dict(state)
        model.save_pretrained(directory, state_dict=weights, max_shard_size=MAX_FILE_SIZE)
    return {path.name: file for path, file in write_share(files, share=share, on_progress=on_progress).items()}


def list_saved_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `save_pretrained` writes for a model, by name. The model may be on the
    `meta` device."""
    files: dict[Path, TensorFile] = {}
    with tempfile.TemporaryDirectory() as directory, _replace_writer(model, Path(directory), files):
        model.save_pretrained(directory, max_shard_size=MAX_FILE_SIZE)
    return {name: tuple(each.shape) for file in files.values() for name, each in file.tensors.items()}


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory. For a tensor on a GPU this memory is pinned, which makes the copy
    several times faster. PyTorch keeps freed pinned memory and uses it again for later copies."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor.detach(), non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copied


def view_on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory: the argument if it is there, or else a copy."""
    return tensor if tensor.device.type == "cpu" else copy_to_host(tensor)


def tensor_pieces(
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    to_host: Callable[[Tensor], Tensor] = view_on_host,
    writer: int = 0,
) -> Iterator[Piece]:
    """Yield the bytes of a safetensors file with these tensors, piece by piece. `to_host` is called with each chunk of
    a tensor. By default, only chunks on an accelerator are copied. `writer` is the rank that writes the file. On other
    ranks, the pieces of lazy tensors may be empty."""
    outlines = {name: TensorOutline(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def make(name: str) -> Tensor:
        return compute_values(tensors[name], writer=writer)

    return streamed_pieces(outlines, make, metadata=metadata, to_host=to_host)


def streamed_pieces(
    outlines: Mapping[str, TensorOutline],
    make: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    to_host: Callable[[Tensor], Tensor] = view_on_host,
) -> Iterator[Piece]:
    """Yield the bytes of a safetensors file in pieces of at most `CHUNK_BYTES`. `outlines` gives the dtype and shape of
    each tensor. `make` is called with a tensor's name to compute the tensor when it is written, and `to_host` with each
    chunk of the tensor. The pieces of a tensor on the meta device are empty."""
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
        tensor = make(name).detach()
        if tensor.numel():
            if not tensor.is_contiguous():
                tensor = (tensor if tensor.is_meta else tensor.cpu()).contiguous()
            bytes_N = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, len(bytes_N), CHUNK_BYTES):
                yield b"" if tensor.is_meta else to_host(bytes_N[start : start + CHUNK_BYTES]).numpy().data


@contextmanager
def _replace_writer(model: PreTrainedModel, directory: Path, files: dict[Path, TensorFile]) -> Iterator[None]:
    """Run the block, in which transformers saves a model, without writing weight files into the directory. Their paths
    and contents are added to `files` on every rank, whereas transformers only writes files on rank 0. The index of the
    files states the number of parameters, for which transformers would count only the parameters that a rank of ZeRO-3
    happens to have in memory.

    transformers has no other hook for this. If a version of transformers writes files by another function, the digests
    are computed later, from the written files.
    """

    def save(tensors: dict[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
        if Path(path).parent == directory:
            files[Path(path)] = TensorFile(tensors, metadata)
        else:  # from another thread
            original(tensors, path, metadata)

    with _SAVING:
        original = transformers.modeling_utils.safe_save_file
        transformers.modeling_utils.safe_save_file = save
        overrides = {"should_save_on_this_rank": lambda _: True, "num_parameters": partial(_count_parameters, model)}
        vars(model).update(overrides)
        try:
            yield
        finally:
            transformers.modeling_utils.safe_save_file = original
            for name in overrides:
                del vars(model)[name]


def _count_parameters(model: PreTrainedModel) -> int:
    """Return the number of parameters of a model, which may be sharded over ranks."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
