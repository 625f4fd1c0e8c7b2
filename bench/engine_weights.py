"""Seconds from the last optimizer step until an engine can generate with the new weights.

The weights are published by the code of the update stage. A rollout worker in another process then loads them with the
engine `transformers`, while they are made durable in the background. `bench.weights --engine` prints the tables.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rheostat.infra.store.bundles import BundledFile, delete_bundle, fetch_bundle, publish_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import TransformersEngine
from rheostat.models.modeling.safetensors import save_pretrained
from rheostat.models.records.versions import ModelVersion
from rheostat.models.training.publishing import Put, make_version_durable, publish_version
from rheostat.models.training.ranks import Ranks, join_ranks
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.loopback import free_port
from tests.support.policies import VOCABULARY, small_tokenizer
from tests.support.s3_servers import moto

RUN: Final = "bench"
LAYER: Final = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
LAYER_BYTES: Final = 130e6
"""Approximate size of one layer in bfloat16."""

READY: Final = "until the engine is ready"

Seconds = dict[str, dict[str, list[float]]]
"""Seconds of each part of publishing and loading weights, by way of storing them and by part."""


@dataclass(frozen=True)
class BenchTrainer:
    """Model that is published as if an optimizer had just changed it."""

    model: PreTrainedModel
    trains_adapters: bool = field(default=False, init=False)

    def step(self) -> None:
        """Change the weights, so that the next version has another digest."""
        with torch.no_grad():
            next(self.model.parameters()).add_(1.0)

    def save_weights(
        self, directory: Path, *, writers: int = 1, on_progress: Callable[[], None] = lambda: None
    ) -> dict[str, BundledFile]:
        """Write the weights like the trainer of a single rank."""
        return save_pretrained(self.model, directory, on_progress=on_progress)


def build_trainer(gigabytes: float) -> BenchTrainer:
    """Build a trainer for a language model with random weights of about this size in bfloat16."""
    layers = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    config = Qwen3Config(vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=True, **LAYER)
    with torch.device("cpu"):
        return BenchTrainer(Qwen3ForCausalLM(config).to(torch.bfloat16))


def measure_stores(gigabytes: float, *, rounds: int) -> Iterator[tuple[str, Seconds]]:
    """Yield the seconds of publishing, loading and both for each way of storing new weights, by store."""
    ranks, trainer = join_ranks(0, 1, address="127.0.0.1", port=free_port()), build_trainer(gigabytes)
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as home:
        local = Path(home, "runs").as_uri()
        ways: dict[str, Put] = {"synced to disk first": "durable", "synced while the engine loads": "early"}
        yield "local store", _measure(local, trainer, ways, ranks=ranks, rounds=rounds)
        with moto(Path(home)) as server:
            place = server.place()
            os.environ.update(place.environment)
            ways = {"uploaded first": "early", "uploaded while the engine loads": "staged"}
            yield "S3 (moto)", _measure(place.uri, trainer, ways, ranks=ranks, rounds=rounds)


def _measure(uri: str, trainer: BenchTrainer, ways: Mapping[str, Put], *, ranks: Ranks, rounds: int) -> Seconds:
    store = open_store(f"{uri}/{RUN}")
    seconds: Seconds = {name: {} for name in ways}
    with store.scratch() as scratch:
        save_pretrained(trainer.model, scratch)
        small_tokenizer().save_pretrained(scratch)
        first = ModelVersion(version=0, weights=publish_bundle(store, scratch, prefix="policies"))
    with _rollout_worker(uri) as load:
        load(first)
        for index in range(rounds + 1):
            for name, put in (reversed if index % 2 else list)(list(ways.items())):
                trainer.step()
                times = _publish_and_load(store, trainer, first, put, ranks=ranks, load=load)
                if index:  # the first round reserves memory and threads
                    for part, each in times.items():
                        seconds[name].setdefault(part, []).append(each)
    return seconds


def _publish_and_load(
    store: Store,
    trainer: BenchTrainer,
    parent: ModelVersion,
    put: Put,
    *,
    ranks: Ranks,
    load: Callable[[ModelVersion], None],
) -> dict[str, float]:
    """Publish the trainer's weights, load them into the engine, and make them durable at the same time. Return the
    seconds of publishing, of loading, of both and until the weights are durable."""
    os.sync()
    ignore_progress = partial(int)
    began = time.perf_counter()
    version = publish_version(
        store, trainer, version=1, parent=parent, ranks=ranks, put=put, on_progress=ignore_progress
    )
    published = time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        sync = partial(make_version_durable, store, version.weights, ranks=ranks, on_progress=ignore_progress)
        syncing = thread.submit(sync)
        load(version)
        ready = time.perf_counter()
        syncing.result()
    durable = time.perf_counter()
    fetch_bundle(store, version.weights)
    for each in (store, store.staging()):
        delete_bundle(each, version.weights)
    times = {"publish": published - began, "load": ready - published, READY: ready - began}
    return times | {"until the weights are durable": durable - began}


@contextmanager
def _rollout_worker(uri: str) -> Iterator[Callable[[ModelVersion], None]]:
    """Run the block with a function that loads a version into a rollout worker in another process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(uri, theirs), daemon=True)
    process.start()
    theirs.close()

    def load(version: ModelVersion) -> None:
        ours.send(version)
        if ours.recv() != version.digest:
            raise AssertionError("the engine has loaded another version")

    try:
        yield load
    finally:
        ours.send(None)
        process.join()


def _serve(uri: str, pipe: Connection) -> None:
    worker = RolloutWorker(uri, RUN, TransformersEngine(dtype="bfloat16"), torch.get_num_threads())
    while (version := pipe.recv()) is not None:
        pipe.send(worker.take(version))
