"""Update workers of the tests, alone and as ranks."""

import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from infra.store import bundles
from infra.store.bundles import fetch_bundle, has_bundle
from infra.store.storage import open_store
from models.config.algorithms import Grpo
from models.config.objectives import KlPenalty, UpdateConfig
from models.records.versions import ModelVersion, Outcome
from models.records.work import UpdateWork
from models.workers.update import UpdateWorker
from tests.support.jobs import wait_for
from tests.support.processes import preload
from tests.support.training import write_samples

preload("models.workers.update", "tests.support.training")  # not DeepSpeed: it chooses its accelerator when imported

CONFIG = UpdateConfig(learning_rate=1e-3, minibatches=2, microbatch_tokens=120, kl=KlPenalty(coefficient=0.1))

UNCLIPPED = CONFIG.model_copy(update={"minibatches": 1, "max_grad_norm": 1e9})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(uri: str, config: UpdateConfig = CONFIG, *, rank: int = 0, ranks: int = 1, port: int = 0) -> UpdateWorker:
    worker = UpdateWorker(uri, "run", update=config, algorithm=Grpo(), temperature=0.9, threads=1)
    worker.join(rank, ranks, "127.0.0.1", port or free_port())
    return worker


def work(uri: str, policy: ModelVersion, *, reference: ModelVersion | None = None, **samples) -> UpdateWork:
    shard = write_samples(f"{uri}/run", **{"seed": policy.version} | samples)
    return UpdateWork(
        iteration=policy.version,
        policy=policy,
        reference=reference or policy,
        samples=(shard,),
        total_iterations=2,
        seed=policy.version,
        kl_coefficient=0.1,
    )


def files(uri: str, outcome: Outcome, part: str) -> Path:
    store, bundle = open_store(f"{uri}/run"), getattr(outcome.model, part)
    assert wait_for(lambda: has_bundle(store, bundle), seconds=30), "a state is written beside what follows"
    return fetch_bundle(store, bundle)


def gradients(uri: str, outcome: Outcome) -> np.ndarray:
    """The first step's gradients: Adam's first moment after one step is a tenth of them."""
    moments = load_file(files(uri, outcome, "state") / "rank-00000.safetensors")
    names = sorted((name for name in moments if name.startswith("exp_avg.")), key=lambda name: int(name[8:]))
    return np.concatenate([moments[name].numpy().ravel() * 10 for name in names])


def bytes_moved(act: Callable[[], object], monkeypatch) -> tuple[int, int]:
    """Bytes that this process writes to files, and those that it reads, while it does something."""
    hashed, digest = [0], bundles._digest

    def counting(path: Path) -> str:
        hashed[0] += path.stat().st_size  # mapped, which the system does not count
        return digest(path)

    def counted() -> tuple[int, int]:
        found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(found["wchar"]), int(found["rchar"])

    with monkeypatch.context() as patch:
        patch.setattr(bundles, "_digest", counting)
        before = counted()
        act()
        after = counted()
    return after[0] - before[0], after[1] - before[1] + hashed[0]


# ---- several ranks
def together(job: Callable[..., None], uri: str, *args: object, ranks: int = 2) -> None:
    method = "spawn" if torch.cuda.is_available() else "forkserver"  # a fork cannot use CUDA after its parent has
    mp.start_processes(job, args=(ranks, free_port(), uri, *args), nprocs=ranks, start_method=method)


def take_updates(rank: int, ranks: int, port: int, uri: str, configs: list[UpdateConfig], parents: list, name: str):
    """Update each parent until version 2, one configuration after another; rank 0 notes the policies."""
    found = []
    for config, parent in zip(configs, parents, strict=True):
        worker, outcomes = start(uri, config, rank=rank, ranks=ranks, port=port), []
        version = parent
        while version.version < 2:
            outcomes.append(worker.update(work(uri, version)))
            version = outcomes[-1].model
        found.append(outcomes)
        # One poisoned sample, on one rank, is everybody's.
        assert worker.update(work(uri, version, advantages=[float("nan")])).metrics["quarantined"] == 1
        assert worker.update(work(uri, version)).metrics["quarantined"] == 0
    listening = [link.laddr.ip for link in psutil.Process().net_connections() if link.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1"}, listening
    torch.save(found, Path(uri, f"{name}-{rank}.pt"))


def read(uri: str, name: str) -> list[list[Outcome]]:
    return torch.load(Path(uri, f"{name}-0.pt"), weights_only=False)


def staged(stage: int, dtype: str = "float32") -> UpdateConfig:
    return CONFIG.model_copy(update={"zero_stage": stage, "dtype": dtype})


def same_after_restart(uri: str, policy: ModelVersion, configs: list[UpdateConfig], *, ranks: int) -> None:
    together(take_updates, uri, configs, [policy] * len(configs), "hot", ranks=ranks)
    hot = read(uri, "hot")
    together(take_updates, uri, configs, [first.model for first, _ in hot], "cold", ranks=ranks)
    assert [outcomes[-1].model for outcomes in hot] == [outcomes[-1].model for outcomes in read(uri, "cold")]
