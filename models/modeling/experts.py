"""Mixtures of experts under training: what their routers say of the tokens of a pass, and how evenly they choose.

A router gives each token K of a layer's experts, and each of these a weight. Shapes: L tokens that a pass reads, N
written tokens, R routers of a model, E experts of each, K of them chosen, F chosen by all routers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.records.model_input import Experts

Routed = tuple[Tensor, Tensor, Tensor]
"""What a router returns: logits of all experts, weights of the chosen ones, and which these are."""

MOST_IN_8_BITS: Final = 256


def routers(model: nn.Module) -> list[nn.Module]:
    """A model's routers, as transformers writes them, in the order of its layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def count_experts(model: nn.Module) -> int:
    """Count the experts that a token of a layer may be given; 0 of a model without any."""
    return max((int(cast(nn.Parameter, router.weight).shape[0]) for router in routers(model)), default=0)


@dataclass
class ExpertRouting:
    """What the routers said of the states that predict the written tokens of the pass that was begun last."""

    positions_N: Tensor | None = None
    logits_NE: dict[int, Tensor] = field(default_factory=dict)
    """By router, with the gradient's graph."""
    chosen_NK: dict[int, Tensor] = field(default_factory=dict)
    """By router, experts that the tokens went to."""

    def begin(self, positions_N: Tensor) -> None:
        """Forget the pass before; the states at these places are those that predict."""
        self.positions_N = positions_N
        self.logits_NE, self.chosen_NK = {}, {}

    def counts(self) -> Tensor:
        """Count the tokens of each router's experts (R x E, float64)."""
        return torch.stack(
            [
                torch.bincount(self.chosen_NK[number].flatten(), minlength=logits_NE.shape[1]).double()
                for number, logits_NE in sorted(self.logits_NE.items())
            ]
        )

    def balance_loss(self, counts_RE: Tensor) -> Tensor:
        """This pass's share of the load-balancing loss of all tokens that `counts_RE` is of, the mean over routers.

        E · Σ over experts of tokens per expert · mean probability (Switch Transformers, arXiv 2101.03961, eq. 4 to 6,
        with K experts for each token): K where all are used alike. It is transformers' `load_balancing_loss_func` of
        each layer; of all layers together, layers whose unevenness cancels out would count as even.
        """
        num_routers, experts = counts_RE.shape
        rows = counts_RE[0].sum() / self.chosen_NK[0].shape[1]
        sums = [self.logits_NE[number].float().softmax(dim=-1).sum(dim=0) for number in range(num_routers)]
        probabilities_RE, share_RE = torch.stack(sums), (counts_RE / rows).to(sums[0].dtype)
        return experts * (share_RE * probabilities_RE).sum() / (num_routers * rows).to(sums[0].dtype)

    def hear(self, number: int, router: nn.Module, read: object, output: Routed) -> None:
        """Note what a router said."""
        if self.positions_N is not None:
            logits_LE, _, chosen_LK = output
            self.logits_NE[number] = logits_LE.index_select(0, self.positions_N)
            self.chosen_NK[number] = chosen_LK.index_select(0, self.positions_N)


def watch_routers(model: PreTrainedModel) -> ExpertRouting | None:
    """Have a model's routers tell what they say; none of a model without any."""
    routing, found = ExpertRouting(), routers(model)
    for number, module in enumerate(found):
        module.register_forward_hook(partial(routing.hear, number))
    return routing if found else None


class ChosenExperts:
    """Which experts the routers of a model chose in the pass that was run last."""

    def __init__(self, found: Sequence[nn.Module], *, num_experts: int) -> None:
        self.width = chosen_width(found)
        self.dtype = np.dtype(np.uint8 if num_experts <= MOST_IN_8_BITS else np.uint16)
        self._chosen_LK: dict[int, Tensor] = {}

    def of_pass(self) -> Experts:
        """Return those of each token, router after router, and let go of them."""
        chosen_LF = torch.cat([self._chosen_LK[number] for number in sorted(self._chosen_LK)], dim=1)
        self._chosen_LK.clear()
        experts: Experts = chosen_LF.cpu().numpy().astype(self.dtype)
        return experts

    def hear(self, number: int, router: nn.Module, read: object, output: Routed) -> None:
        """Note what a router chose."""
        self._chosen_LK[number] = output[2].flatten(0, -2).to(torch.int16)


@contextmanager
def heard_choices(model: nn.Module) -> Iterator[ChosenExperts]:
    """Have the routers of a model, of which there must be some, tell what they choose inside the context."""
    found = routers(model)
    chosen = ChosenExperts(found, num_experts=count_experts(model))
    hooks = [router.register_forward_hook(partial(chosen.hear, number)) for number, router in enumerate(found)]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def chosen_width(found: Sequence[nn.Module]) -> int:
    """Count the experts that a token is given by all of the routers."""
    return sum(int(cast(int, router.top_k)) for router in found)


def load_metrics(counts_RE: Tensor) -> dict[str, float]:
    """Say how far the most and the least used expert of any layer are from an even share, which is 1."""
    loads_RE = counts_RE / counts_RE.mean(dim=1, keepdim=True).clamp(min=1e-9)
    return {"router_load_max": float(loads_RE.max()), "router_load_min": float(loads_RE.min())}
