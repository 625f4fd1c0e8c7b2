"""Whole iterations compared with TRL's `GRPOTrainer`: same policy, prompts, group size, lengths and optimizer steps.

TRL runs one block of iterations before Rheostat's job and one after it, so that a machine that becomes slower or faster
affects both. TRL generates with transformers and has two threads, which is its default. Rheostat's job has two rollout
workers and its update ranks, with one thread each. Both generate with the policy of the last update and take four
optimizer steps. TRL computes old log-probs, while Rheostat uses those of the engine, which are the same up to rounding.
The first iterations of each block are ignored. TRL has its best options for a CPU: sdpa, no checkpointing, the largest
micro-batches. Liger's kernels need a GPU, and TRL's GRPO has no packing.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.cycles import read_cycles
from bench.inputs import GROUP, LEARNING_RATE, MINIBATCHES, PROMPTS, REWARD_PATTERN, Inputs, write_inputs
from bench.jobs import FinishedJob, PeakMemory, run_job_to_end
from bench.tables import Cell, Table
from bench.trl_workload import TrlIteration, Workload, start_trl
from infra.store.runs import Run
from models.text.tokenizer import load_tokenizer
from tasks.run.keys import iteration_key

SETTLED = 2


@dataclass(frozen=True, slots=True)
class Size:
    """Model and number of measured iterations."""

    name: str
    shape: Mapping[str, object]
    max_new_tokens: int
    update_ranks: int
    iterations: int
    """Number of counted iterations in each of TRL's two blocks. Rheostat's job runs twice as many."""
    preamble: str = ""
    """Text before each problem."""


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
    Size(
        name="larger, prompts as long as completions",
        shape={"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32},
        max_new_tokens=64,
        update_ranks=2,
        iterations=3,
        preamble="Please count them with care: ",
    ),
)


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """Medians over iterations."""

    seconds: float
    generation: float
    """Seconds of generation and rewards."""
    update: float
    """Seconds of optimizer steps and TRL's old log-probs.
    Rheostat's include reading samples and publishing weights and states.
    """
    tokens: float
    """Number of completion tokens per iteration."""

    @property
    def other(self) -> float:
        return self.seconds - self.generation - self.update


def measure() -> Iterator[Table]:
    """Compare both at every size."""
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
            inputs = write_inputs(
                Path(name),
                shape=size.shape,
                max_new_tokens=size.max_new_tokens,
                update_ranks=size.update_ranks,
                preamble=size.preamble,
            )
            peak = PeakMemory()
            with compare_with_trl(inputs, iterations=size.iterations, peak=peak) as (job, theirs):
                compared = medians_of(job.run), medians(theirs)
            tokenizer = load_tokenizer(inputs.policy)
            prompt = statistics.fmean(len(tokenizer(each)["input_ids"]) for each in inputs.prompts)
            more = (
                ("mean prompt, tokens", prompt, prompt, ""),
                ("largest process, MiB", peak.bytes / 2**20, max(one.peak_bytes for one in theirs) / 2**20, ""),
            )
        shape = size.shape
        model = f"{size.name} model: Llama-shaped, width {shape['hidden_size']}, {shape['num_hidden_layers']} layers"
        yield table(model, *compared, max_new_tokens=size.max_new_tokens, iterations=size.iterations, more=more)


@contextmanager
def compare_with_trl(
    inputs: Inputs,
    *,
    iterations: int,
    images: tuple[Path, ...] = (),
    peak: Callable[[int, Path], None] = lambda _pid, _run: None,
) -> Iterator[tuple[FinishedJob, list[TrlIteration]]]:
    """Run the block with a Rheostat job that ran between two blocks of TRL's iterations.
    Yields the job and TRL's counted iterations.

    TRL's second block runs before the yield. `peak` is called repeatedly while the job runs.
    """
    workload = Workload(
        policy=inputs.policy,
        prompts=inputs.prompts,
        images=images,
        group=GROUP,
        minibatches=MINIBATCHES,
        learning_rate=LEARNING_RATE,
        reward_pattern=REWARD_PATTERN,
        max_new_tokens=inputs.max_new_tokens,
        block=iterations + SETTLED,
        blocks=2,
        microbatch=len(inputs.prompts) * GROUP // MINIBATCHES,
    )
    with start_trl(Path(sys.executable), workload, inputs.config.with_name("workload.json")) as take_block:
        before = take_block()
        with run_job_to_end(inputs.config, [f"iterations={2 * iterations + SETTLED}"], on_poll=peak) as job:
            yield job, [*before[SETTLED:], *take_block()[SETTLED:]]


def medians_of(run: Run) -> MeasuredIteration:
    """Return the medians of a finished run of Rheostat."""

    def tokens(number: int) -> float:
        return sum(manifest.metrics["tokens"] for manifest in run.manifests(f"{iteration_key(number)}/rollout/"))

    return _medians(
        MeasuredIteration(
            seconds=cycle.seconds,
            generation=cycle.stages["rollout"] + cycle.stages["scoring"],
            update=cycle.stages["credit"] + cycle.stages["update"],
            tokens=tokens(cycle.number),
        )
        for cycle in read_cycles(run)[SETTLED:]
    )


def medians(taken: Iterable[TrlIteration]) -> MeasuredIteration:
    """Return the medians of TRL's iterations."""
    return _medians(
        MeasuredIteration(
            seconds=one.seconds, generation=one.generation, update=one.seconds - one.generation, tokens=one.tokens
        )
        for one in taken
    )


def _medians(measured: Iterable[MeasuredIteration]) -> MeasuredIteration:
    iterations = list(measured)

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in iterations)

    return MeasuredIteration(
        seconds=median("seconds"), generation=median("generation"), update=median("update"), tokens=median("tokens")
    )


def table(
    model: str,
    ours: MeasuredIteration,
    theirs: MeasuredIteration,
    *,
    max_new_tokens: int,
    iterations: int,
    more: Sequence[tuple[Cell, ...]] = (),
) -> Table:
    """Build a table that compares Rheostat with TRL."""
    completions = PROMPTS * GROUP
    # Lengths are random. Per token, shorter completions give no advantage.
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
        *more,
    )
    return Table(
        title=f"Compared with TRL's GRPOTrainer, {model}, {PROMPTS} prompts × {GROUP}, {MINIBATCHES} optimizer steps, "
        f"up to {max_new_tokens} tokens",
        columns=("", "Rheostat", "TRL", "times as fast"),
        rows=rows,
        notes=(f"medians of {2 * iterations} iterations of each; half of TRL's ran before and half after ours",),
    )
