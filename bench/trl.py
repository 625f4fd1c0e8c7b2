"""Whole iterations beside TRL's `GRPOTrainer`: same policy, prompts, group size, lengths and optimizer steps.

TRL takes one block of iterations before our job and one after it, so that a machine that gets slower or faster weighs
on both. TRL generates with transformers and has two threads, as it would take by itself; our job has two rollout
workers and its update ranks of one thread each. Both generate with the policy that the last update left, compute old
log-probs and take four optimizer steps. The first iterations of each block are not counted.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.cycles import cycles_of
from bench.inputs import GROUP, LEARNING_RATE, MINIBATCHES, PROMPTS, REWARD_PATTERN, write_inputs
from bench.jobs import finished_job
from bench.tables import Table
from bench.trl_workload import TrlIteration, Workload, running_trl
from infra.store.runs import Run
from tasks.run.keys import iteration_key

SETTLED = 2


@dataclass(frozen=True, slots=True)
class Size:
    """A model and how much of it is measured."""

    name: str
    shape: Mapping[str, object]
    max_new_tokens: int
    update_ranks: int
    iterations: int
    """Counted iterations per block of TRL, of which there are two; our job takes twice as many."""


SIZES = (
    Size(
        name="demo",
        shape={"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8},
        max_new_tokens=32,
        update_ranks=1,
        iterations=8,
    ),
    Size(
        name="larger",
        shape={"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32},
        max_new_tokens=64,
        update_ranks=2,
        iterations=3,
    ),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over iterations."""

    seconds: float
    generation: float
    """Generation and rewards, in seconds."""
    update: float
    """Old log-probs and optimizer steps; ours reads samples and publishes weights and optimizer state besides."""
    tokens: float
    """Completion tokens per iteration."""

    @property
    def other(self) -> float:
        return self.seconds - self.generation - self.update


def measure() -> Iterator[Table]:
    """Compare at every size."""
    for size in SIZES:
        yield _table(size, *_compare(size))


def _compare(size: Size) -> tuple[Measured, Measured]:
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        inputs = write_inputs(
            directory, shape=size.shape, max_new_tokens=size.max_new_tokens, update_ranks=size.update_ranks
        )
        workload = Workload(
            policy=inputs.policy,
            prompts=inputs.prompts,
            group=GROUP,
            minibatches=MINIBATCHES,
            learning_rate=LEARNING_RATE,
            reward_pattern=REWARD_PATTERN,
            max_new_tokens=inputs.max_new_tokens,
            block=size.iterations + SETTLED,
            blocks=2,
            microbatch=len(inputs.prompts) * GROUP // MINIBATCHES,
        )
        with running_trl(Path(sys.executable), workload, directory / "workload.json") as take_block:
            before = take_block()
            with finished_job(inputs.config, [f"iterations={2 * size.iterations + SETTLED}"]) as job:
                ours = _ours(job.run)
            after = take_block()
    return ours, _medians(map(_measured, [*before[SETTLED:], *after[SETTLED:]]))


def _measured(taken: TrlIteration) -> Measured:
    return Measured(
        seconds=taken.seconds,
        generation=taken.generation,
        update=taken.seconds - taken.generation,
        tokens=taken.tokens,
    )


def _ours(run: Run) -> Measured:
    def tokens(number: int) -> float:
        return sum(manifest.metrics["tokens"] for manifest in run.manifests(f"{iteration_key(number)}/rollout/"))

    return _medians(
        Measured(
            seconds=cycle.seconds,
            generation=cycle.stages["rollout"] + cycle.stages["scoring"],
            update=cycle.stages["credit"] + cycle.stages["update"],
            tokens=tokens(cycle.number),
        )
        for cycle in cycles_of(run)[SETTLED:]
    )


def _medians(measured: Iterable[Measured]) -> Measured:
    taken = list(measured)

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in taken)

    return Measured(
        seconds=median("seconds"), generation=median("generation"), update=median("update"), tokens=median("tokens")
    )


def _table(size: Size, ours: Measured, theirs: Measured) -> Table:
    completions = PROMPTS * GROUP
    shape = size.shape
    model = f"Llama-shaped, width {shape['hidden_size']}, {shape['num_hidden_layers']} layers"
    # Lengths are random: per token, neither gains by shorter completions.
    per_token = (theirs.seconds / theirs.tokens) / (ours.seconds / ours.tokens)
    rows = (
        ("whole iteration, seconds", ours.seconds, theirs.seconds, theirs.seconds / ours.seconds),
        ("generation and rewards, seconds", ours.generation, theirs.generation, theirs.generation / ours.generation),
        ("update, seconds", ours.update, theirs.update, theirs.update / ours.update),
        ("other (orchestration), seconds", ours.other, theirs.other, ""),
        ("mean completion, tokens", ours.tokens / completions, theirs.tokens / completions, ""),
        (
            "update, tokens/s",
            ours.tokens / ours.update,
            theirs.tokens / theirs.update,
            (ours.tokens / ours.update) / (theirs.tokens / theirs.update),
        ),
        ("whole iteration, tokens/s", ours.tokens / ours.seconds, theirs.tokens / theirs.seconds, per_token),
    )
    return Table(
        title=f"Beside TRL's GRPOTrainer, {size.name} model: {model}, {PROMPTS} prompts × {GROUP}, "
        f"{MINIBATCHES} optimizer steps, up to {size.max_new_tokens} tokens",
        columns=("", "Rheostat", "TRL", "times as fast"),
        rows=rows,
        notes=(f"medians of {2 * size.iterations} iterations of each, TRL's half before and half after ours",),
    )
