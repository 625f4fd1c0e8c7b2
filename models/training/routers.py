"""How a mixture of experts uses its experts while it learns, and the loss that evens it out.

Shapes: R routers of a model, E experts of each.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.modeling.experts import load_metrics
from models.modeling.layout import MicroBatch
from models.training.ranks import Ranks, sum_over_ranks
from models.training.trainer import Trainer


class RouterTally:
    """How evenly the experts of a policy are used by the tokens that it learns from, and the loss for that.

    The loss is of a whole optimizer step, over all its passes and ranks, whatever these are: with a coefficient the
    experts' tokens are counted in a pass of their own before it. A policy without experts costs nothing.
    """

    def __init__(self, trainer: Trainer, *, coefficient: float | None, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._coefficient = coefficient
        self._counts_RE: Tensor | None = None
        """Of the step that is taken."""
        self._total_RE: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0

    def begin(self, passes: Sequence[MicroBatch], on_progress: Callable[[], None]) -> None:
        """Count what the step's tokens choose, where the loss needs it."""
        routing = self._trainer.routing
        if routing is None or self._coefficient is None:
            return
        counts_RE: Tensor | float = 0.0
        for batch in passes:
            with torch.no_grad():
                self._trainer.forward(batch)
            counts_RE = routing.counts() + counts_RE
            on_progress()
        assert isinstance(counts_RE, Tensor), "a step has passes"
        sum_over_ranks(counts_RE)
        self._counts_RE = counts_RE

    def loss(self) -> Tensor | float:
        """Count the pass before, and return its share of the step's loss, times the coefficient."""
        routing = self._trainer.routing
        if routing is None:
            return 0.0
        self._total_RE = routing.counts() + self._total_RE
        if self._coefficient is None or self._counts_RE is None:
            return 0.0
        share = routing.balance_loss(self._counts_RE)
        self._loss = self._loss + share.detach().double()
        return self._coefficient * share

    def metrics(self, steps: int) -> dict[str, float]:
        """Name what was counted over all steps and ranks; the loss is the mean of the steps', without coefficient."""
        if not isinstance(self._total_RE, Tensor):
            return {}
        sum_over_ranks(self._total_RE)
        found = load_metrics(self._total_RE)
        if isinstance(self._loss, Tensor):
            sum_over_ranks(self._loss)
            found["router_loss"] = float(self._loss) / steps
        return found
