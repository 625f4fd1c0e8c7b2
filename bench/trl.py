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
from rheostat.infra.store.runs import Run
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.tasks.run.keys import iteration_key

SETTLED = 2


@dataclass(frozen=True, slots=True)
class Size:
    """Model size and number of iterations of one comparison with TRL."""

    name: str
    shape: Mapping[str, object]
    max_new_tokens: int
    update_ranks: int
    iterations: int
    """Number of measured iterations in each of TRL's two blocks of iterations.

    Rheostat's job measures twice as many.
    """
    preamble: str = ""
    """Text that is inserted before each problem to make prompts longer."""


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
    """Seconds and number of tokens of one training iteration, or medians of these over iterations."""

    seconds: float
    generation: float
    """Seconds for generating completions and computing their rewards."""
    update: float
    """Seconds of the optimizer steps. TRL's seconds include computing its old log-probs.

    Rheostat's include credit, reading samples, and publishing weights and states.
    """
    tokens: float
    """Number of completion tokens generated in the iteration."""

    @property
    def other(self) -> float:
        return self.seconds - self.generation - self.update


def measure() -> Iterator[Table]:
    """Measure whole training iterations of Rheostat and of TRL's `GRPOTrainer`, and yield one table per model size."""
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
    """Run iterations of TRL, then a Rheostat job, then iterations of TRL again, to compare their times.

    Yields the finished job and the times of TRL's iterations. `iterations` is the number of measured iterations in each
    of TRL's two blocks. The job runs twice as many. The first iterations of each are left out. `images` are the images
    of the prompts, if any. `peak` is called repeatedly with the process ID and run directory of the job.
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
    """Return the median seconds and tokens of the iterations of a finished Rheostat run, without the first ones."""

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
    """Return the median seconds and tokens of TRL's measured iterations."""
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
    """Build a table that compares the seconds and tokens/s of Rheostat's and TRL's iterations.

    `model` describes the model in the title, and `more` contains additional rows.
    """
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
