"""Epochs of learning to draw beside TRL's `DDPOTrainer`: the same pipeline, prompts, pictures, steps and optimizer.

Each trainer has a process of its own, in an environment of its own, and one thread; they take turns, epoch by epoch,
and the order changes. Both draw every step with DDIM's noise (η = 1) and guidance, as DDPO does by default; both read
as many states in a pass. Ours are the workers of a run over a store on disk. Before that TRL writes states that it drew
and what it says of them, and ours says the same or the part stops.
"""

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.ddpo_pipeline import write_small_pipeline
from bench.ddpo_rheostat import denoising_of
from bench.ddpo_workload import DrawingWorkload, EpochCost, running
from bench.tables import Table
from infra.errors import BadInput
from models.denoising.families import gather
from models.denoising.pipeline import FrozenParts, load_denoiser
from models.denoising.policy import byte_tokenizer
from models.denoising.samplers import transition
from models.denoising.steps import Drawing

PYTHON_VARIABLE = "BENCH_DDPO_PYTHON"
"""Python of TRL's environment; unset is the one that `make bench-ddpo` makes beside ours."""
ROUNDS = 5
STEPS, LEARNT = 6, (6, 3)
TOLERANCE = 1e-5
PROMPTS = tuple(f"a {colour} {form}" for colour in ("red", "green", "blue") for form in ("circle", "square"))
WORKLOAD = DrawingWorkload(
    pipeline=Path(),
    prompts=PROMPTS,
    group=4,
    steps=STEPS,
    learnt=STEPS,
    guidance=5.0,  # DDPOConfig's
    together=12,
    states=6,  # one picture with all its steps, two with half of them
    minibatches=2,
    learning_rate=1e-6,
    clip=1e-4,
    weight_decay=1e-4,
    trail=Path(),
)


def measure() -> Iterator[Table]:
    """Compare what both say of the same steps, then what both take for all steps and for some."""
    python = find_trl()
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        weights = write_small_pipeline(directory / "pipeline")
        workload = replace(WORKLOAD, pipeline=directory / "pipeline", trail=directory / "trail.npz")
        for learnt in LEARNT:
            asked = replace(workload, learnt=learnt)
            ours, theirs = _rounds(asked, python, directory / "workload.json")
            if learnt == STEPS:
                yield steps_table(*said_of_trail(asked))
            yield table(asked, ours, theirs, weights=weights)


def find_trl() -> Path:
    """Find the environment. Raises BadInput where there is none."""
    given = os.environ.get(PYTHON_VARIABLE)
    python = Path(given) if given else Path(f"{sys.prefix}-ddpo") / "bin" / "python"
    if not python.exists():
        raise BadInput(f"ddpo: expected the environment of TRL's DDPOTrainer, found no {python}; run `make bench-ddpo`")
    return python


def _rounds(workload: DrawingWorkload, python: Path, path: Path) -> tuple[list[EpochCost], list[EpochCost]]:
    """Take turns; the first round of both is not counted."""
    workload.write(path)
    ours, theirs = list[EpochCost](), list[EpochCost]()
    with (
        running(python, "bench.ddpo_trainer", path) as take_theirs,
        running(Path(sys.executable), "bench.ddpo_rheostat", path) as take_ours,
    ):
        turns = [(take_ours, ours), (take_theirs, theirs)]
        for number in range(ROUNDS + 1):
            for take, taken in turns if number % 2 else reversed(turns):
                taken.append(take())
            sys.stderr.write(f"    round {number} of {ROUNDS}: {ours[-1].cpu:.1f} s, TRL {theirs[-1].cpu:.1f} s\n")
    return ours[1:], theirs[1:]


@torch.no_grad()
def said_of_trail(workload: DrawingWorkload) -> tuple[Tensor, Tensor]:
    """Log-probs of the steps that TRL drew, as our trainer says them and as TRL does: pictures x steps.

    TRL's have the constants of the normal distribution, which ours leave out: they are added here.
    """
    trail = np.load(workload.trail)
    byte_tokenizer().save_pretrained(workload.pipeline)  # what the import of a policy adds
    drawing = Drawing.of(workload.pipeline, denoising_of(workload), FrozenParts(device="cpu"))
    model = load_denoiser(workload.pipeline).eval()
    states, following, theirs_NT = (torch.from_numpy(trail[name]) for name in ("latents", "next_latents", "log_probs"))
    count = len(states)
    told = gather([drawing.prompts.read(text) for text in trail["prompts"].tolist()], range(count))
    without, said = drawing.unconditioned(count, model), []
    for step in range(workload.steps):
        steps_N, x_ND = torch.full((count,), step), states[:, step].flatten(1)
        said_ND = drawing.say(model, x_ND, steps_N, told, without)
        mean_ND, std_N = transition(drawing.config.sampler, x_ND, said_ND, steps_N, drawing.schedule)
        logprobs_N = drawing.logprobs(following[:, step].flatten(1), mean_ND, std_N)
        said.append(logprobs_N - std_N.log() - math.log(2 * math.pi) / 2)
    return torch.stack(said, dim=1), theirs_NT


def steps_table(ours_NT: Tensor, theirs_NT: Tensor) -> Table:
    """Say by how much they differ. Raises BadInput where that is more than rounding."""
    apart = (ours_NT - theirs_NT).abs().max().item()
    if not apart <= TOLERANCE:
        raise BadInput(f"ddpo: expected log-probs of TRL's own steps within {TOLERANCE:g}, found {apart:g}")
    return Table(
        title="Log-probs of steps that TRL drew, the mean over a state's numbers",
        columns=("", "steps", "least", "most", "largest difference"),
        rows=(("Rheostat beside TRL", theirs_NT.numel(), theirs_NT.min().item(), theirs_NT.max().item(), apart),),
    )


def table(workload: DrawingWorkload, ours: Sequence[EpochCost], theirs: Sequence[EpochCost], *, weights: int) -> Table:
    """Medians of both, and of the ratios round by round."""

    def row(title: str, name: str, scale: float = 1.0) -> tuple[str, float, float, float, float, float]:
        mine, others = ([getattr(each, name) * scale for each in side] for side in (ours, theirs))
        ratios = [other / one for one, other in zip(mine, others, strict=True)]
        return title, statistics.median(mine), statistics.median(others), statistics.median(ratios), *_ends(ratios)

    learnt = "all learnt" if workload.learnt == workload.steps else f"{workload.learnt} learnt"
    return Table(
        title=f"Beside TRL's DDPOTrainer, a UNet of {weights:,} weights: {workload.pictures} pictures of "
        f"{workload.steps} steps, {learnt}",
        columns=("", "Rheostat", "TRL", "TRL / Rheostat", "least", "most"),
        rows=(
            row("drawing, CPU seconds", "drawing_cpu"),
            ("of it, loading the new policy", statistics.median(each.loading_cpu for each in ours), "", "", "", ""),
            row("training, CPU seconds", "training_cpu"),
            row("epoch, CPU seconds", "cpu"),
            row("drawing, seconds", "drawing"),
            row("training, seconds", "training"),
            row("epoch, seconds", "seconds"),
            row("peak memory, MiB", "peak_bytes", 2**-20),
        ),
        notes=(
            f"medians of {len(ours)} epochs of each, taken in turns after one that is not counted, one thread each",
            f"guidance {workload.guidance:g}, {workload.together} pictures drawn together, passes of "
            f"{workload.states} states, {workload.minibatches} optimizer steps",
        ),
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)
