"""Learning curves of GRPO with other losses, regularizers and choices of prompts on the demo's problems, with the same
start and budget on three seeds."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.curves import SEEDS, Recipe, table, train_curves
from bench.tables import Table

PLOT = Path(__file__).parents[1] / "docs" / "losses.png"
UNCORRECTED = "update.correction.kind=none"
RECIPES: Mapping[str, Recipe] = {
    "GRPO": Recipe(()),
    "SAPO": Recipe(("update.loss={kind='sapo'}",)),
    "GMPO": Recipe(("update.loss={kind='gmpo'}",)),
    "Clip-Cov": Recipe(("update.loss={kind='clip_cov'}",)),
    "KL-Cov": Recipe(("update.loss={kind='kl_cov'}",)),
    "DPPO": Recipe(("update.loss={kind='dppo'}",)),
    "VESPO": Recipe(("update.loss={kind='vespo'}", UNCORRECTED)),
    "LUSPO": Recipe(
        ("update.loss={kind='gspo', clip_low=0.05, clip_high=0.05, aggregation={kind='constant', length=1}}",)
    ),
    "entropy bonus": Recipe(("update.entropy.coefficient=1e-3",)),
    "top-entropy tokens": Recipe(("update.top_entropy=0.2",)),
    "NLL of correct completions": Recipe(("update.positive_nll.coefficient=0.1",)),
    "KL, reference reset every 8 iterations": Recipe(("update.kl={kind='k3', coefficient=1e-2, reset_every=8}",)),
    "KL, reference is a moving average": Recipe(("update.kl={kind='k3', coefficient=1e-2, ema_decay=0.9}",)),
    "512 problems": Recipe(("data.options.train_problems=512",)),
    "512 problems, curriculum": Recipe(("rollout.curriculum={candidates=2}", "data.options.train_problems=512")),
}


def measure() -> Iterator[Table]:
    """Train every recipe on every seed, plot the learning curves in docs/losses.png, and yield a table of them."""
    yield table(f"Losses and regularizers on the demo's problems, {len(SEEDS)} seeds", train_curves(RECIPES, PLOT))
