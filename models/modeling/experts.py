"""Mixtures of experts in training: recording of router outputs, load of the experts, and the load-balancing loss.

A router chooses K of a layer's experts for each token and gives a weight to each chosen expert. Shapes: L tokens in a
micro-batch, N completion tokens, R routers of a model, E experts of each router, K experts that a router chooses for a
token, F experts that all routers choose for a token.
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

from rheostat.models.modeling.trials import whole_shape
from rheostat.models.records.model_input import Experts

Routed = tuple[Tensor, Tensor, Tensor]
"""Output of one layer's mixture-of-experts router: the logits of all experts, and the weights and the indices of the
chosen experts."""

MAX_EXPERTS_IN_8_BITS: Final = 256


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the mixture-of-experts routers of a model in the order of its layers. A router is a module whose class
    name ends in "TopKRouter", as in transformers."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def count_experts(model: nn.Module) -> int:
    """Return the number of experts among which a router of the model chooses, or 0 for a model without
    mixture-of-experts layers."""
    return max((whole_shape(cast(nn.Parameter, router.weight))[0] for router in routers(model)), default=0)


@dataclass
class ExpertRouting:
    """Outputs of the mixture-of-experts routers in the latest forward pass, recorded at the positions that predict
    completion tokens."""

    positions_N: Tensor | None = None
    logits_NE: dict[int, Tensor] = field(default_factory=dict)
    """Router logits of shape (completion tokens, experts), keyed by the router's number. They are part of the autograd
    graph."""
    chosen_NK: dict[int, Tensor] = field(default_factory=dict)
    """Indices of the experts that a router chose for each token, of shape (completion tokens, experts per token), keyed
    by the router's number."""

    def reset(self, positions_N: Tensor) -> None:
        """Clear the recorded outputs before a forward pass. Router outputs are then recorded only at `positions_N`, the
        positions that predict completion tokens."""
        self.positions_N = positions_N
        self.logits_NE, self.chosen_NK = {}, {}

    def counts(self) -> Tensor:
        """Count for how many recorded tokens each expert was chosen. Returns float64 of shape (routers, experts)."""
        return torch.stack(
            [
                _count(self.chosen_NK[number].flatten().long(), logits_NE.shape[1]).double()
                for number, logits_NE in sorted(self.logits_NE.items())
            ]
        )

    def balance_loss(self, counts_RE: Tensor) -> Tensor:
        """Return this micro-batch's share of the load-balancing loss of a mixture of experts, averaged over routers.
        `counts_RE` holds, for each router, the number of tokens of each expert in the whole optimizer step.

        The loss of a router is E · Σ over experts of (share of tokens · mean probability) (Switch Transformers, arXiv
        2101.03961, eq. 4 to 6, with K experts for each token). It is K if all experts are used equally. transformers'
        `load_balancing_loss_func` is applied to each layer separately, because over all layers together, opposite
        imbalances would cancel out.
        """
        num_routers, experts = counts_RE.shape
        rows = counts_RE[0].sum() / self.chosen_NK[0].shape[1]
        sums = [self.logits_NE[number].float().softmax(dim=-1).sum(dim=0) for number in range(num_routers)]
        probabilities_RE, share_RE = torch.stack(sums), (counts_RE / rows).to(sums[0].dtype)
        return experts * (share_RE * probabilities_RE).sum() / (num_routers * rows).to(sums[0].dtype)

    def record_output(self, number: int, router: nn.Module, read: object, output: Routed) -> None:
        """Record the logits and chosen experts of router `number`. PyTorch calls this as the router's forward hook with
        the module, its input `read` and its output."""
        if self.positions_N is not None:
            logits_LE, _, chosen_LK = output
            self.logits_NE[number] = logits_LE.index_select(0, self.positions_N)
            self.chosen_NK[number] = chosen_LK.index_select(0, self.positions_N)


def _count(chosen_C: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert occurs in `chosen_C`. The function `torch.bincount` would wait for the GPU."""
    return chosen_C.new_zeros(num_experts).scatter_add(0, chosen_C, torch.ones_like(chosen_C))


def record_router_outputs(model: PreTrainedModel) -> ExpertRouting | None:
    """Attach hooks that record the outputs of a mixture of experts' routers during training, and return the record.
    Return None for a model without routers."""
    routing, modules = ExpertRouting(), routers(model)
    for number, module in enumerate(modules):
        module.register_forward_hook(partial(routing.record_output, number))
    return routing if modules else None


class ChosenExperts:
    """Record of the experts that the routers of a model chose for each token in the latest forward pass."""

    def __init__(self, modules: Sequence[nn.Module], *, num_experts: int) -> None:
        self.width = chosen_width(modules)
        self.dtype = np.dtype(np.uint8 if num_experts <= MAX_EXPERTS_IN_8_BITS else np.uint16)
        self._chosen_LK: dict[int, Tensor] = {}

    def pop_choices(self) -> Experts:
        """Return the experts that the routers chose for each token, of shape (tokens, chosen experts of all routers),
        and clear the record."""
        chosen_LF = torch.cat([self._chosen_LK[number] for number in sorted(self._chosen_LK)], dim=1)
        self._chosen_LK.clear()
        experts: Experts = chosen_LF.cpu().numpy().astype(self.dtype)
        return experts

    def record_output(self, number: int, router: nn.Module, read: object, output: Routed) -> None:
        """Record the experts that router `number` chose. PyTorch calls this as the router's forward hook with the
        module, its input `read` and its output."""
        self._chosen_LK[number] = output[2].flatten(0, -2).to(torch.int16)


@contextmanager
def record_chosen_experts(model: nn.Module) -> Iterator[ChosenExperts]:
    """Run the block with hooks that record which experts the routers of a model choose. The model must have
    mixture-of-experts layers."""
    modules = routers(model)
    choices = ChosenExperts(modules, num_experts=count_experts(model))
    hooks = [
        router.register_forward_hook(partial(choices.record_output, number)) for number, router in enumerate(modules)
    ]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()


def chosen_width(modules: Sequence[nn.Module]) -> int:
    """Return the number of experts that all routers in `modules` together choose for one token."""
    return sum(int(cast(int, router.top_k)) for router in modules)


def load_metrics(counts_RE: Tensor) -> dict[str, float]:
    """Return metrics of the most used and the least used expert, given the number of tokens of each expert. A load of 1
    is the mean load of the experts in the same layer."""
    loads_RE = counts_RE / counts_RE.mean(dim=1, keepdim=True).clamp(min=1e-9)
    return {"router_load_max": float(loads_RE.max()), "router_load_min": float(loads_RE.min())}
