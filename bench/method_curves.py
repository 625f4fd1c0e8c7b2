"""Results of training on preference pairs, on finished images and on a teacher, with the same start and budget on three
seeds."""

import sys
from collections.abc import Iterator, Mapping
from statistics import fmean

from bench.curves import CONFIGS, SEEDS, Curve, Recipe, run_curve, table, train_curves
from bench.tables import Table

DISTILL = CONFIGS / "distill.toml"
WITH_TEACHER = ("algorithm.distillation.teacher.path={teacher}",)
TEACHERS: Mapping[str, Recipe] = {
    "log-prob of the sampled token": Recipe(WITH_TEACHER, DISTILL),
    "reverse KL over 64 tokens": Recipe((*WITH_TEACHER, "algorithm.distillation.top_k={tokens=64}"), DISTILL),
    "forward KL over 64 tokens": Recipe(
        (*WITH_TEACHER, "algorithm.distillation.top_k={tokens=64, direction='forward'}"), DISTILL
    ),
}
PAIRS: Mapping[str, Recipe] = {
    name: Recipe((f"dpo.loss={{{loss}}}",), CONFIGS / "dpo.toml")
    for name, loss in {
        "DPO": "kind='dpo'",
        "IPO": "kind='ipo'",
        "SimPO": "kind='simpo'",
        "CPO": "kind='cpo'",
        "ORPO": "kind='orpo'",
        "KTO": "kind='kto'",
    }.items()
}
PAINT = CONFIGS / "demos/paint/job.toml"
IMAGES: Mapping[str, tuple[str, ...]] = {
    "Flow-GRPO": (),
    "DiffusionNFT": (
        "rollout.denoising={steps=10, sampler={kind='ode'}, text_tokens=1}",
        "update.loss={kind='diffusion_nft'}",
    ),
}


def measure() -> Iterator[Table]:
    """Train with each method on every seed, and yield a table for preference pairs, for images and for teachers."""
    yield _compare_ends(f"Preference pairs of the demo's problems, {len(SEEDS)} seeds", train_curves(PAIRS, None))
    curves: dict[str, list[Curve]] = {name: [] for name in IMAGES}
    for seed in SEEDS:
        for name, overrides in IMAGES.items():
            curves[name].append(run_curve(PAINT, (f"seed={seed}", *overrides), term="painting"))
            sys.stderr.write(f"seed {seed}  {name}: {curves[name][-1].after:.3f}\n")
    yield table(f"The image demo, {len(SEEDS)} seeds", curves)
    yield table(f"Teachers on the demo's problems, {len(SEEDS)} seeds", train_curves(TEACHERS, None))


def _compare_ends(title: str, curves: Mapping[str, list[Curve]]) -> Table:
    """Build a table of the solved shares after training without rollouts. The only evaluation of such a run follows the
    training."""
    rows = []
    for name, runs in curves.items():
        after = [run.after for run in runs]
        rows.append((name, fmean(after), f"{min(after):.3f} to {max(after):.3f}"))
    return Table(
        title=title,
        columns=("", "after", "after, over seeds"),
        rows=tuple(rows),
        notes=("held-out problems, greedy decoding",),
    )
