"""Updates of a small policy on this process's device, and on the CPU in a process that sees no GPU."""

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.records.versions import Outcome
from tests.support.training import publish_scratch
from tests.support.update_workers import gradients, start_worker, update_work

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


class Updates(NamedTuple):
    """Two updates, one after the other, and the second of them in a new worker, which loads the first one's state."""

    first: Outcome
    second: Outcome
    resumed: Outcome
    gradients: np.ndarray | None
    """Gradients of the first update, float32 numbers in the order of the optimizer's state, if the optimizer is AdamW.
    Its first moments contain the gradients."""


def take_updates(uri: str, config: UpdateConfig) -> Updates:
    """Publish a small random policy in the store `uri`, and update it on random samples."""
    policy = publish_scratch(f"{uri}/run", Path(uri, "scratch"))
    worker = start_worker(uri, config)
    first = worker.update(replace(update_work(uri, policy), total_iterations=3))
    work = replace(update_work(uri, first.model, reference=policy), total_iterations=3)
    second = worker.update(work)
    worker.close()
    new = start_worker(uri, config)
    resumed = new.update(work)
    new.close()
    stores_gradients = config.optimizer.kind == "adamw"
    return Updates(first, second, resumed, gradients(uri, first) if stores_gradients else None)


def take_updates_on_cpu(directory: Path, configs: Mapping[str, UpdateConfig]) -> dict[str, Updates]:
    """Take updates for each configuration in processes that see no GPU. Each has a store in the directory."""
    uris = [str(directory / name) for name in configs]
    # A spawned process gets the environment that this process has when the spawned one starts.
    processes = min(4, os.cpu_count() or 1)
    with (
        patch.dict(os.environ, WITHOUT_GPUS),
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        return dict(zip(configs, pool.map(take_updates, uris, configs.values()), strict=True))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference of two vectors, divided by the norm of the expected one."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
