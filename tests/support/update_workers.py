"""Update workers for tests: one worker in this process, or several ranks in processes of their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import pyarrow as pa
import torch
import torch.multiprocessing as mp
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor

from rheostat.infra.store import bundles
from rheostat.infra.store.bundles import fetch_bundle, has_bundle
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import AlgorithmConfig, Grpo
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling import head
from rheostat.models.records.schemas import SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import EstimateWork, PreferenceWork, ProcessModelWork, RewardModelWork, UpdateWork
from rheostat.models.workers.update import UpdateWorker
from tests.support.jobs import wait_for
from tests.support.processes import preload
from tests.support.servers import reserved_port
from tests.support.training import write_samples

preload(
    "rheostat.models.workers.update", "tests.support.training"
)  # not DeepSpeed: it chooses its accelerator when imported

CONFIG = UpdateConfig(learning_rate=1e-3, minibatches=2, microbatch_tokens=120, kl=KlPenalty(coefficient=0.1))
"""Two clipped optimizer steps per update, each of several micro-batches."""
UNCLIPPED = CONFIG.model_copy(update={"minibatches": 1, "max_grad_norm": 1e9})
"""One optimizer step per update, whose Adam moments are proportional to the gradient."""
LORA = LoraConfig(rank=4, alpha=10)
DORA = LoraConfig(rank=4, alpha=10, dora=True)


Config = TypeVar("Config", bound=BaseModel)


def change(config: Config, **settings: object) -> Config:
    """Return a configuration with other settings, which are not validated."""
    return config.model_copy(update=settings)


def start_worker(
    uri: str,
    config: UpdateConfig = CONFIG,
    *,
    algorithm: AlgorithmConfig | None = None,
    temperature: float = 0.9,
    denoising: DenoisingConfig | None = None,
    rank: int = 0,
    ranks: int = 1,
    port: int = 0,
) -> UpdateWorker:
    """Start an update worker of run `run`. Collective if there are several ranks."""
    algorithm = algorithm or Grpo()
    worker = UpdateWorker(
        uri, "run", update=config, algorithm=algorithm, temperature=temperature, denoising=denoising, threads=1
    )
    if port:
        worker.join(rank, ranks, "127.0.0.1", port)
    else:
        join_alone(worker)
    return worker


def join_alone(worker: UpdateWorker) -> None:
    """Make a worker the only rank."""
    with reserved_port() as port:
        worker.join(0, 1, "127.0.0.1", port)


def update_work(uri: str, policy: ModelVersion, *, reference: ModelVersion | None = None, **samples) -> UpdateWork:
    """Return the work of an update of a policy on random samples; `samples` are options of `write_samples`. It is the
    last update of its run, so that it ends when its optimizer state is stored and another worker can continue from
    it. Earlier updates write their states in the background."""
    shard = write_samples(f"{uri}/run", **{"seed": policy.version} | samples)
    return UpdateWork(
        iteration=policy.version,
        policy=policy,
        reference=reference or policy,
        samples=(shard,),
        total_iterations=policy.version + 1,
        seed=policy.version,
        kl_coefficient=0.1,
    )


def read_rows(uri: str, work: UpdateWork) -> list[dict]:
    """Return the samples of an update's first shard."""
    return read_shard(open_store(f"{uri}/run"), work.samples[0], SAMPLE_SCHEMA.names).to_pylist()


def with_rows(uri: str, work: UpdateWork, rows: list[dict]) -> UpdateWork:
    """Return the work with other samples."""
    table = pa.Table.from_pylist(rows, SAMPLE_SCHEMA)
    return replace(work, samples=(write_shard(open_store(f"{uri}/run"), table, kind="samples", metadata={}),))


def update_once(uri: str, policy: ModelVersion, config: UpdateConfig = CONFIG, **options) -> Outcome:
    """Update a policy in a new worker; `options` are those of `update_work`."""
    return start_worker(uri, config).update(update_work(uri, policy, **options))


def fetch_part(uri: str, outcome: Outcome, part: str) -> Path:
    """Return the directory of an outcome's `weights`, `adapter` or `state`."""
    store, bundle = open_store(f"{uri}/run"), getattr(outcome.model, part)
    assert wait_for(lambda: has_bundle(store, bundle), seconds=240), "a state is written while the next update runs"
    return fetch_bundle(store, bundle)


def load_trained(uri: str, model: ModelVersion) -> dict[str, Tensor]:
    """Return the tensors that training changes: those of the adapter, or all weights if there is none."""
    part, name = (model.adapter, "adapter_model") if model.adapter else (model.weights, "model")
    return load_file(fetch_bundle(open_store(f"{uri}/run"), part) / f"{name}.safetensors")


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of the difference of two sets of tensors."""
    assert found.keys() == expected.keys()
    return sum(float((found[name] - expected[name]).float().norm()) ** 2 for name in expected) ** 0.5


def gradients(uri: str, outcome: Outcome) -> np.ndarray:
    """Return the gradients of the first step on one rank: Adam's first moment after one step is a tenth of them."""
    moments = load_file(fetch_part(uri, outcome, "state") / "rank-00000.safetensors")
    names = sorted((name for name in moments if name.startswith("exp_avg.")), key=lambda name: int(name[8:]))
    return np.concatenate([moments[name].numpy().ravel() * 10 for name in names])


def bytes_moved(act: Callable[[], object], monkeypatch) -> tuple[int, int]:
    """Return the bytes that this process writes to files, and the bytes that it reads, during a call."""
    hashed, digest = [0], bundles.digest_file

    def counting(path: Path) -> str:
        hashed[0] += path.stat().st_size  # mapped, which the system does not count
        return digest(path)

    def counted() -> tuple[int, int]:
        found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(found["wchar"]), int(found["rchar"])

    with monkeypatch.context() as patch:
        patch.setattr(bundles, "digest_file", counting)
        before = counted()
        act()
        after = counted()
    return after[0] - before[0], after[1] - before[1] + hashed[0]


# ---- several ranks
Work = UpdateWork | EstimateWork | PreferenceWork | RewardModelWork | ProcessModelWork


@dataclass(frozen=True)
class Job:
    """Work that all ranks of a group do together, in a new worker."""

    config: UpdateConfig
    works: Sequence[Work]
    follow: Callable[[str, Outcome], Sequence[Work]] | None = None
    """Function that returns further work from the run's directory and the last outcome."""
    algorithm: AlgorithmConfig | None = None
    denoising: DenoisingConfig | None = None
    poisons: bool = False
    """Whether two updates follow: one in which a sample of one rank is not finite, and one in which all are finite."""


def start_ranks(job: Callable[..., None], uri: str, *args: object, ranks: int = 2) -> None:
    """Run `job(rank, ranks, port, uri, *args)` in a process for each rank."""
    method = "spawn" if torch.cuda.is_available() else "forkserver"  # a fork cannot use CUDA after its parent has
    with reserved_port() as port:
        mp.start_processes(job, args=(ranks, port, uri, *args), nprocs=ranks, start_method=method)


def run_on_ranks(uri: str, jobs: Mapping[str, Job], *, ranks: int = 2) -> dict[str, list[Outcome]]:
    """Run jobs one after another on ranks in new processes, and return their outcomes, which all ranks agree on."""
    start_ranks(_run_jobs, uri, dict(jobs), ranks=ranks)
    found, *others = (torch.load(Path(uri, f"outcomes-{rank}.pt"), weights_only=False) for rank in range(ranks))
    for other in others:
        for name, outcomes in found.items():
            pairs = zip(outcomes, other[name], strict=True)
            assert all((a.model, a.critic, a.shards) == (b.model, b.critic, b.shards) for a, b in pairs), name
    return found


def perform(worker: UpdateWorker, work: Work) -> Outcome:
    match work:
        case EstimateWork():
            return worker.estimate(work)
        case PreferenceWork():
            return worker.prefer(work)
        case RewardModelWork():
            return worker.train_reward_model(work)
        case ProcessModelWork():
            return worker.train_process_model(work)
        case _:
            return worker.update(work)


def _run_jobs(rank: int, ranks: int, port: int, uri: str, jobs: Mapping[str, Job]) -> None:
    found = {}
    head.elements_on = lambda device: 5 * 354  # five tokens at once, so that ranks have different numbers of chunks
    for name, job in jobs.items():
        worker = start_worker(
            uri, job.config, algorithm=job.algorithm, denoising=job.denoising, rank=rank, ranks=ranks, port=port
        )
        outcomes = [perform(worker, work) for work in job.works]
        if job.follow is not None:
            outcomes += [perform(worker, work) for work in job.follow(uri, outcomes[-1])]
        if job.poisons:
            for advantages, quarantined in (([float("nan")], 1), (None, 0)):
                work = update_work(uri, outcomes[-1].model, advantages=advantages)
                assert worker.update(work).metrics["quarantined"] == quarantined
        found[name] = outcomes
        worker.close()
    listening = [link.laddr.ip for link in psutil.Process().net_connections() if link.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1"}, listening
    torch.save(found, Path(uri, f"outcomes-{rank}.pt"))


def chain(
    uri: str, policy: ModelVersion, updates: int, *, kept: Sequence[int] = ()
) -> tuple[list[UpdateWork], list[Outcome]]:
    """Run successive updates that keep the states of some versions. Return their work and outcomes."""
    worker, works, outcomes = start_worker(uri), list[UpdateWork](), list[Outcome]()
    for number in range(1, updates + 1):
        version = outcomes[-1].model if outcomes else policy
        asked = replace(
            update_work(uri, version, reference=policy), total_iterations=updates, keeps_state=number in kept
        )
        works.append(asked)
        outcomes.append(worker.update(asked))
    return works, outcomes
