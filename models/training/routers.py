"""Expert load of a mixture-of-experts policy during training, and the load-balancing loss.

Shapes: R routers of a model, E experts of each router.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rheostat.models.modeling.experts import load_metrics
from rheostat.models.modeling.layout import MicroBatch
from rheostat.models.training.ranks import Ranks, sum_over_ranks
from rheostat.models.training.trainer import Trainer


class RouterTally:
    """Counter of the training tokens that each expert of a mixture-of-experts policy processes, with the load-balancing
    loss. Computes nothing for a policy without experts.

    The loss refers to a whole optimizer step, over all its micro-batches and ranks. If it has a coefficient, the tokens
    of each expert are therefore counted in separate forward passes before the step.
    """

    def __init__(self, trainer: Trainer, *, coefficient: float | None, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._coefficient = coefficient
        self._counts_RE: Tensor | None = None
        """Number of tokens of each expert in the current optimizer step, of shape (routers, experts), or None if not
        counted."""
        self._total_RE: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0

    def begin_step(self, microbatches: Sequence[MicroBatch], on_progress: Callable[[], None]) -> None:
        """Count how many tokens of an optimizer step each expert processes, if the load-balancing loss needs the
        counts. `on_progress` is called after every forward pass. Collective: every rank must call this."""
        routing = self._trainer.routing
        if routing is None or self._coefficient is None:
            return
        counts_RE: Tensor | float = 0.0
        for batch in microbatches:
            with torch.no_grad():
                self._trainer.forward(batch)
            counts_RE = routing.counts() + counts_RE
            on_progress()
        assert isinstance(counts_RE, Tensor), "a step has micro-batches"
        sum_over_ranks(counts_RE)
        self._counts_RE = counts_RE

    def loss(self) -> Tensor | float:
        """Add the latest forward pass to the counts of tokens per expert, and return the load-balancing loss of this
        forward pass times its coefficient."""
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
        """Return metrics of how evenly tokens are distributed over experts, for `steps` optimizer steps on all ranks.
        The metric `router_loss` is the load-balancing loss without its coefficient, averaged over the steps.
        Collective: every rank must call this."""
        if not isinstance(self._total_RE, Tensor):
            return {}
        sum_over_ranks(self._total_RE)
        metrics = load_metrics(self._total_RE)
        if isinstance(self._loss, Tensor):
            sum_over_ranks(self._loss)
            metrics["router_loss"] = float(self._loss) / steps
        return metrics
