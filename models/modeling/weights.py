"""Loading weights from a directory: safetensors only, nothing from the network, nothing left to chance."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from infra.errors import BadInput

_MAKING = threading.RLock()


@contextmanager
def making_models() -> Iterator[None]:
    """Make models in one thread of the process at a time, and leave the caller's random state as it was.

    transformers replaces torch's functions of initialisation and its default dtype meanwhile, for all threads.
    """
    transformers_logging.disable_progress_bar()
    with _MAKING, torch.random.fork_rng(devices=[]):
        yield


class Architecture(Protocol):
    """One of transformers' `AutoModelFor…` classes."""

    def from_pretrained(self, path: str, **options: object) -> tuple[PreTrainedModel, dict[str, list[str]]]:
        """Load a model and, with `output_loading_info`, what was missing."""
        ...


def load_weights(
    architecture: Architecture, directory: Path, *, what: str, device: str, dtype: torch.dtype
) -> PreTrainedModel:
    """Load a model; `what` it is begins the message where it does not load.

    A weight that is missing is an error: transformers would fill it with random numbers and a warning.
    """
    try:
        with making_models():
            model, loading = architecture.from_pretrained(
                str(directory),
                dtype=dtype,
                device_map=device,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (ValueError, KeyError, TypeError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"{what} {directory}: its weights do not load: {first_line(error)}") from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise BadInput(
            f"{what} {directory}: {len(missing)} weights are missing from its safetensors, first {missing[0]}"
        )
    return model


def first_line(error: BaseException) -> str:
    """What an error says first, or its name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
