"""Training epochs of a text-to-image policy compared with TRL's `DDPOTrainer`.

Both use the same pipeline, prompts, images, steps and optimizer. Each trainer has a separate process and environment,
and one thread. They take turns, epoch by epoch, in alternating order. Both generate every step with DDIM's noise (η =
1) and guidance, as DDPO does by default, and both read the same number of states in a forward pass. On Rheostat's side,
the workers of a run use a store on disk. First, TRL writes states that it generated and their log-probs. The benchmark
stops if Rheostat computes other log-probs for them.
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
from bench.ddpo_workload import DrawingWorkload, EpochCost, start_trainer
from bench.tables import Table
from rheostat.infra.errors import BadInput
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.policy import byte_tokenizer
from rheostat.models.denoising.samplers import transition
from rheostat.models.denoising.steps import GenerationSetup

PYTHON_VARIABLE = "BENCH_DDPO_PYTHON"
"""Name of the environment variable that contains the path of the Python interpreter of TRL's environment.

If the variable is not set, the environment that `make bench-ddpo` builds is used.
"""
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
    guidance=5.0,  # the value in DDPOConfig
    together=12,
    states=6,  # one image with all its steps, two with half of them
    minibatches=2,
    learning_rate=1e-6,
    clip=1e-4,
    weight_decay=1e-4,
    trail=Path(),
)


def measure() -> Iterator[Table]:
    """Compare training epochs of a text-to-image policy in Rheostat and in TRL's `DDPOTrainer`.

    Yields a table that compares the log-probs of the same denoising steps. Then yields a table of times and peak memory
    for training on all denoising steps, and one for training on half of them.
    """
    python = find_trl()
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        weights = write_small_pipeline(directory / "pipeline")
        workload = replace(WORKLOAD, pipeline=directory / "pipeline", trail=directory / "trail.npz")
        for num_trained in LEARNT:
            variant = replace(workload, learnt=num_trained)
            ours, theirs = _rounds(variant, python, directory / "workload.json")
            if num_trained == STEPS:
                yield steps_table(*read_logprobs(variant))
            yield table(variant, ours, theirs, weights=weights)


def find_trl() -> Path:
    """Return the path of the Python interpreter of TRL's environment.

    Raises BadInput if the interpreter does not exist.
    """
    configured = os.environ.get(PYTHON_VARIABLE)
    python = Path(configured) if configured else Path(f"{sys.prefix}-ddpo") / "bin" / "python"
    if not python.exists():
        raise BadInput(
            f"ddpo: the environment of TRL's DDPOTrainer is not installed (no {python}). Run `make bench-ddpo`."
        )
    return python


def _rounds(workload: DrawingWorkload, python: Path, path: Path) -> tuple[list[EpochCost], list[EpochCost]]:
    """Run epochs of Rheostat and TRL alternately. Return Rheostat's costs and TRL's costs, without the warm-up round.

    `python` is the interpreter of TRL's environment, and the workload is written to `path`.
    """
    workload.write(path)
    ours, theirs = list[EpochCost](), list[EpochCost]()
    with (
        start_trainer(python, "bench.ddpo_trainer", path) as take_theirs,
        start_trainer(Path(sys.executable), "bench.ddpo_rheostat", path) as take_ours,
    ):
        turns = [(take_ours, ours), (take_theirs, theirs)]
        for number in range(ROUNDS + 1):
            for take, taken in turns if number % 2 else reversed(turns):
                taken.append(take())
            sys.stderr.write(f"    round {number} of {ROUNDS}: {ours[-1].cpu:.1f} s, TRL {theirs[-1].cpu:.1f} s\n")
    return ours[1:], theirs[1:]


@torch.no_grad()
def read_logprobs(workload: DrawingWorkload) -> tuple[Tensor, Tensor]:
    """Compute Rheostat's log-probs of denoising steps that TRL sampled.

    Return them and TRL's, each of shape (images, steps). TRL's log-probs include the constants of the normal
    distribution, which Rheostat's omit. The constants are added to Rheostat's log-probs here.
    """
    trail = np.load(workload.trail)
    byte_tokenizer().save_pretrained(workload.pipeline)  # added when a policy is imported
    setup = GenerationSetup.load(workload.pipeline, denoising_of(workload), FrozenParts(device="cpu"))
    model = load_denoiser(workload.pipeline).eval()
    states, following, theirs_NT = (torch.from_numpy(trail[name]) for name in ("latents", "next_latents", "log_probs"))
    count = len(states)
    condition = setup.prompts.select(trail["prompts"].tolist(), range(count))
    empty_condition, predictions = setup.encode_empty_prompt(count, model), []
    for step in range(workload.steps):
        steps_N, x_ND = torch.full((count,), step), states[:, step].flatten(1)
        prediction_ND = setup.predict(model, x_ND, steps_N, condition, empty_condition)
        mean_ND, std_N = transition(setup.config.sampler, x_ND, prediction_ND, steps_N, setup.schedule)
        logprobs_N = setup.logprobs(following[:, step].flatten(1), mean_ND, std_N)
        predictions.append(logprobs_N - std_N.log() - math.log(2 * math.pi) / 2)
    return torch.stack(predictions, dim=1), theirs_NT


def steps_table(ours_NT: Tensor, theirs_NT: Tensor) -> Table:
    """Build a table with the largest difference between the log-probs of Rheostat and TRL, of shape (images, steps).

    Raises BadInput if the difference exceeds rounding errors (`TOLERANCE`).
    """
    apart = (ours_NT - theirs_NT).abs().max().item()
    if not apart <= TOLERANCE:
        raise BadInput(
            f"ddpo: our log-probs of TRL's steps differ by {apart:g} from TRL's, more than the tolerance {TOLERANCE:g}"
        )
    return Table(
        title="Log-probs of denoising steps sampled by TRL, mean over the values of a state",
        columns=("", "steps", "least", "most", "largest difference"),
        rows=(("Rheostat beside TRL", theirs_NT.numel(), theirs_NT.min().item(), theirs_NT.max().item(), apart),),
    )


def table(workload: DrawingWorkload, ours: Sequence[EpochCost], theirs: Sequence[EpochCost], *, weights: int) -> Table:
    """Build a table that compares the median times and peak memory of Rheostat's and TRL's epochs.

    The ratios TRL / Rheostat are computed for each pair of epochs. `weights` is the number of weights of the UNet.
    """

    def row(title: str, name: str, scale: float = 1.0) -> tuple[str, float, float, float, float, float]:
        mine, others = ([getattr(each, name) * scale for each in side] for side in (ours, theirs))
        ratios = [other / one for one, other in zip(mine, others, strict=True)]
        return title, statistics.median(mine), statistics.median(others), statistics.median(ratios), *_ends(ratios)

    trained = "all trained" if workload.learnt == workload.steps else f"{workload.learnt} trained"
    return Table(
        title=f"Compared with TRL's DDPOTrainer, a UNet of {weights:,} weights: {workload.pictures} pictures of "
        f"{workload.steps} steps, {trained}",
        columns=("", "Rheostat", "TRL", "TRL / Rheostat", "least", "most"),
        rows=(
            row("generation, CPU seconds", "drawing_cpu"),
            ("of which loading the new policy", statistics.median(each.loading_cpu for each in ours), "", "", "", ""),
            row("training, CPU seconds", "training_cpu"),
            row("epoch, CPU seconds", "cpu"),
            row("generation, seconds", "drawing"),
            row("training, seconds", "training"),
            row("epoch, seconds", "seconds"),
            row("peak memory, MiB", "peak_bytes", 2**-20),
        ),
        notes=(
            f"medians of {len(ours)} epochs of each, alternating, after one warm-up epoch each, one thread each",
            f"guidance {workload.guidance:g}, {workload.together} pictures generated together, micro-batches of "
            f"{workload.states} states, {workload.minibatches} optimizer steps",
        ),
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)
