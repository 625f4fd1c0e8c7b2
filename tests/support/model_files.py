"""Changes to the files of a model directory."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def change_files(directory: Path, changes: Mapping[str, str | int | Mapping[str, object] | None]) -> None:
    """Change files by name.

    None removes a file, a number removes that many bytes from its end, text replaces its content, and a mapping sets
    its keys or tensors.
    """
    for name, change in changes.items():
        if change is None:
            (directory / name).unlink()
        elif isinstance(change, int):
            (directory / name).write_bytes((directory / name).read_bytes()[:-change])
        elif isinstance(change, str):
            (directory / name).write_text(change)
        elif name.endswith(".safetensors"):
            set_tensors(directory / name, change)
        else:
            (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | change))


def set_tensors(path: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Replace tensors of a safetensors file; None removes the tensor."""
    tensors = load_file(path) | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, path, metadata={"format": "pt"})
