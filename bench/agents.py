"""Speed of an engine through the door of a rollout worker, with agents that sleep, and the memory of the worker."""

import gc
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from bench.tables import Table
from bench.tools import GROUP, PROMPTS, THREADS, TURN_TOKENS, TURNS, build_work, write_prompts
from rheostat.infra.store.storage import open_store
from rheostat.models.config.agents import AgentEnvironment
from rheostat.models.config.engines import TransformersEngine
from rheostat.models.records.work import RolloutWork
from rheostat.models.workers.rollout import RolloutWorker

DOOR_TURNS: Final = (256, 1024)
"""Numbers of tokens of the turns of the shards with which the door is measured. All turns of a shard have the same
length, because the turns of episodes have other seeds than completions without a program: with random lengths, one side
would have more tokens or longer turns. Each shard takes some tenths of a second more than with the engine alone,
because agents start and end."""
NO_END: Final = 1e-9
"""Probability of the end token with which practically no turn ends before its maximum length."""
PAIRS: Final = 5
NAP_SECONDS: Final = 1.0
MEMORY_SHARDS: Final = 16
"""Number of shards of 64 episodes after which the memory of the worker is compared with that after the first ones."""


def measure() -> Iterator[Table]:
    """Measure tokens per second through the door relative to the engine alone, tokens per second with sleeping agents
    relative to agents that do not sleep, and the memory of the worker over many episodes."""
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as home:
        store = open_store(f"{home}/bench")
        for turn_tokens in DOOR_TURNS:
            work = build_work(store, Path(home) / f"policy-{turn_tokens}", eos_share=NO_END)
            work = replace(work, sampling=work.sampling.model_copy(update={"max_new_tokens": turn_tokens}))
            yield _compare(
                f"the door, one turn of {turn_tokens:,} tokens",
                ("engine alone", "through the door"),
                (_worker(home, None), work),
                (_worker(home, 1, turn_tokens), work),
            )
        work = build_work(store, Path(home) / "policy")
        sleeping = replace(work, prompts=write_prompts(store, NAP_SECONDS))
        worker = _worker(home, TURNS)
        names = ("agents that do not sleep", "agents that sleep")
        yield _compare(
            f"sleeping agents, {TURNS} turns of up to {TURN_TOKENS} tokens", names, (worker, work), (worker, sleeping)
        )
        yield _measure_memory(home, work)


def _worker(home: str, turns: int | None, turn_tokens: int = TURN_TOKENS) -> RolloutWorker:
    """Return a rollout worker whose agents request this number of turns, or without agents if it is None."""
    settings = AgentEnvironment(
        target="bench.napping:nap", options={"turns": turns}, turn_tokens=turn_tokens, parser="none"
    )
    return RolloutWorker(home, "bench", TransformersEngine(), THREADS, environment=None if turns is None else settings)


def _compare(
    what: str, names: tuple[str, str], one: tuple[RolloutWorker, RolloutWork], other: tuple[RolloutWorker, RolloutWork]
) -> Table:
    """Generate shards alternately in two ways, and return the tokens per second of both and their ratio."""
    sides = (one, other)
    for worker, work in sides:
        worker.generate(work)  # starts processes and loads the policy
    pairs = [[_measure_speed(*side) for side in sides] for _ in range(PAIRS)]
    for worker in {id(worker): worker for worker, _ in sides}.values():
        worker.close()

    def row(label: str, values: list[float]) -> tuple[str, float, float, float]:
        return label, statistics.median(values), min(values), max(values)

    first, second = (list(each) for each in zip(*pairs, strict=True))
    return Table(
        title=f"{what}: {PROMPTS * GROUP} episodes, {THREADS} thread",
        columns=("", "median", "least", "most"),
        rows=(
            row(f"{names[0]}, tokens/s", first),
            row(f"{names[1]}, tokens/s", second),
            row("ratio, pair by pair", [after / before for before, after in pairs]),
        ),
        notes=(f"{PAIRS} pairs after a first shard of each",),
    )


def _measure_speed(worker: RolloutWorker, work: RolloutWork) -> float:
    """Generate one shard, and return the tokens per second."""
    outcome = worker.generate(work)
    assert outcome.timings is not None, "rollout workers measure times"
    return outcome.metrics["tokens"] / outcome.timings["generate"]


def _measure_memory(home: str, work: RolloutWork) -> Table:
    """Return the resident memory of this process after the first shards of episodes, and after many."""
    sizes, process = [], psutil.Process()
    short = replace(work, sampling=work.sampling.model_copy(update={"max_new_tokens": 8}))
    worker = _worker(home, TURNS)
    for _ in range(MEMORY_SHARDS):
        worker.generate(short)
        gc.collect()
        sizes.append(process.memory_info().rss / 2**20)
    worker.close()
    rows = tuple((f"after {(shard + 1) * PROMPTS * GROUP:,} episodes", size) for shard, size in enumerate(sizes))
    return Table(title="memory of the worker", columns=("", "MiB"), rows=(rows[0], *rows[3::4]))
