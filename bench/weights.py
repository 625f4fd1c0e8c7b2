"""Time for which publishing weights, copying optimizer states and verifying files keep a run waiting.

`python -m bench.weights --gigabytes 8` needs no network, no Ray and no Prefect. It uses the GPU if there is one. With
`--engine`, it also measures the time until an engine in another process has loaded the new weights, from a local store
and from a bucket of the S3 server moto.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor

from bench.tables import Table
from rheostat.infra.store.bundles import describe_bundle
from rheostat.infra.store.file_writer import FILES_AT_ONCE, Piece, describe_pieces, write_files, write_pieces
from rheostat.models.modeling.safetensors import copy_to_host, tensor_pieces

GIGABYTES: Final = 2.0
ROUNDS: Final = 5
SHAPE: Final = (4096, 5504)
"""Shape of each tensor: half of a matrix in the feed-forward layer of a policy with 7 billion weights."""

Tensors = Mapping[str, Tensor]
Work = Callable[[], object]


def measure(gigabytes: float = GIGABYTES, *, rounds: int = ROUNDS) -> Iterator[Table]:
    """Yield tables with the seconds of copying, writing and hashing weights, first each alone, then together.

    "in turn" is a single thread that copies, writes and hashes one tensor after another. "side by side" is the code
    that publishes weights. Both take turns. The fastest rounds are compared, because other processes delay slower ones.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = max(FILES_AT_ONCE, round(gigabytes * 1e9 / (2 * SHAPE[0] * SHAPE[1])))
    tensors = {
        f"layer.{index:04d}": torch.full(SHAPE, 1 + index, dtype=torch.bfloat16, device=device)
        for index in range(count)
    }
    size = sum(tensor.nbytes for tensor in tensors.values())
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    notes = (
        f"{where}; PyTorch {torch.__version__}; the load average was {os.getloadavg()[0]:.1f}",
        "written files stay in the page cache, as when a policy is published: they are synced to disk later",
    )
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory:
        root = Path(directory)
        parts = _time_alternately(_build_parts(tensors, root), root, rounds=rounds)
        yield _table("Parts of publishing weights, each alone", parts, size=size, notes=notes)
        for title, pair in _build_pairs(tensors, root).items():
            yield _table(title, _time_alternately(pair, root, rounds=rounds), size=size, notes=notes)


def measure_engines(gigabytes: float = GIGABYTES, *, rounds: int = ROUNDS) -> Iterator[Table]:
    """Yield a table for each kind of store with the seconds from the last optimizer step until an engine can generate.
    The rows are ways of storing the weights, which take turns."""
    from bench.engine_weights import READY, measure_stores

    notes = (f"CPU, {os.cpu_count()} cores; the load average was {os.getloadavg()[0]:.1f}",)
    for store, ways in measure_stores(gigabytes, rounds=rounds):
        medians = {
            name: {part: statistics.median(each) for part, each in parts.items()} for name, parts in ways.items()
        }
        before = next(iter(medians.values()))[READY]
        rows = tuple((name, *parts.values(), parts[READY] / before) for name, parts in medians.items())
        columns = ("medians in seconds", *next(iter(ways.values())), "ready, relative to the first row")
        yield Table(f"From the optimizer step to the engine, {store}: {gigabytes:.1f} GB", columns, rows, notes)


def _table(title: str, seconds: Mapping[str, list[float]], *, size: int, notes: tuple[str, ...]) -> Table:
    fastest = {name: min(each) for name, each in seconds.items()}
    first = next(iter(fastest.values()))
    return Table(
        f"{title}: {size / 1e9:.1f} GB",
        ("", "median, s", "fastest, s", "fastest, GB/s", "relative to the first row"),
        tuple(
            (name, statistics.median(seconds[name]), each, size / 1e9 / each, each / first)
            for name, each in fastest.items()
        ),
        notes,
    )


def _build_parts(tensors: Tensors, root: Path) -> dict[str, Work]:
    """Return functions that do one part of publishing each, by name."""
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    pieces = [*tensor_pieces(on_host)]
    parts: dict[str, Work] = {}
    if next(iter(tensors.values())).is_cuda:
        parts |= {
            "copy from the GPU to pageable memory": lambda: [
                None for tensor in tensors.values() if tensor.cpu() is None
            ],
            "copy from the GPU to pinned memory": lambda: [None for _ in tensor_pieces(tensors)],
        }
    return parts | {
        "hash on one thread": lambda: _hash(pieces, threads=1),
        "hash on all cores": lambda: _hash(pieces, threads=blake3.AUTO),
        "write one file": lambda: write_pieces(root / "one", pieces),
        f"write {FILES_AT_ONCE} files at once": lambda: _write_in_threads(pieces, root),
    }


def _build_pairs(tensors: Tensors, root: Path) -> dict[str, dict[str, Work]]:
    """Return pairs of functions that do the same work, in turn and side by side, by title and name."""
    names = [*tensors]
    shards = {
        root / f"shard-{index}": {name: tensors[name] for name in names[index::FILES_AT_ONCE]}
        for index in range(FILES_AT_ONCE)
    }
    whole = {root / "whole": tensors}
    stored = root / "stored" / "model.safetensors"
    stored.parent.mkdir()
    write_pieces(stored, tensor_pieces(tensors, metadata={"format": "pt"}))
    return {
        "Publishing weights as one file": _pair(
            lambda: [_write_in_turn(path, each) for path, each in whole.items()],
            lambda: write_files({path: tensor_pieces(each) for path, each in whole.items()}),
        ),
        f"Publishing weights as {FILES_AT_ONCE} files": _pair(
            lambda: [_write_in_turn(path, each) for path, each in shards.items()],
            lambda: write_files({path: tensor_pieces(each) for path, each in shards.items()}),
        ),
        "Copying an optimizer state and computing its digest": _pair(
            lambda: _copy_in_turn(tensors), lambda: _copy_side_by_side(tensors)
        ),
        "Loading cached weights: verifying them while they are read": _pair(
            lambda: _read_beside(stored, partial(_hash_mapped, stored)),
            lambda: _read_beside(stored, partial(describe_bundle, stored.parent)),
        ),
    }


def _pair(in_turn: Work, side_by_side: Work) -> dict[str, Work]:
    return {"in turn": in_turn, "side by side": side_by_side}


def _write_in_turn(path: Path, tensors: Tensors) -> str:
    hasher = blake3()
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            piece = tensor.cpu().reshape(-1).view(torch.uint8).numpy().data
            remaining = piece
            while remaining:
                remaining = remaining[file.write(remaining) :]
            hasher.update(piece)
    return hasher.hexdigest()


def _copy_in_turn(tensors: Tensors) -> str:
    copied = [tensor.to("cpu", copy=True) for tensor in tensors.values()]
    return _hash((tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in copied), threads=1)


def _copy_side_by_side(tensors: Tensors) -> str:
    kept: list[Piece] = []

    def copies() -> Iterator[Piece]:
        for piece in tensor_pieces(tensors, to_host=copy_to_host):
            kept.append(piece)
            yield piece

    return describe_pieces(copies()).digest


def _hash(pieces: Iterable[Piece], *, threads: int) -> str:
    hasher = blake3(max_threads=threads)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _hash_mapped(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _read_beside(path: Path, verify: Work) -> None:
    """Read every value of a file while `verify` runs in a thread."""
    with ThreadPoolExecutor(1) as thread:
        verifying = thread.submit(verify)
        for tensor in load_file(path).values():
            tensor.clone()
        verifying.result()


def _write_in_threads(pieces: list[Piece], root: Path) -> None:
    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        for index in range(FILES_AT_ONCE):
            threads.submit(write_pieces, root / f"{index}", pieces[index::FILES_AT_ONCE])


def _time_alternately(works: Mapping[str, Work], root: Path, *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each function in each round. Written files are deleted after each call."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for index in range(rounds + 1):
        for name in reversed(works) if index % 2 else works:
            os.sync()
            began = time.perf_counter()
            works[name]()
            if index:  # the first round reserves memory and threads
                seconds[name].append(time.perf_counter() - began)
            for path in root.iterdir():
                if path.is_file():
                    path.unlink()
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of repetitions")
    parser.add_argument("--engine", action="store_true", help="also measure until an engine has loaded the weights")
    options = parser.parse_args()
    tables = measure(options.gigabytes, rounds=options.rounds)
    engines = measure_engines(options.gigabytes, rounds=options.rounds) if options.engine else ()
    for table in chain(tables, engines):
        sys.stdout.write(f"{table.text()}\n\n")
        sys.stdout.flush()
