"""Router replay: in training, the routers choose the experts that they chose when the completions were sampled.

This is rollout routing replay (R3, arXiv 2510.11370). Without it, routers could choose other experts in training,
because engine and trainer round differently or weights have changed, and log-probs would jump. Only the choice is
replayed. A router weights the chosen experts by its current logits, so it is still trained.

Nearly every `TopKRouter` of transformers chooses by one call of `topk` and computes the weights from the scores that
this call returns. The replay replaces the result of this call, and `can_replay` detects model families that work
differently. Shapes: B rows, T padded width, L tokens of a micro-batch, K experts that a router chooses for a token, F
experts that all routers choose for a token.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rheostat.infra.errors import Damaged
from rheostat.models.modeling.experts import Routed, chosen_width, count_experts, routers
from rheostat.models.modeling.layout import MicroBatch
from rheostat.models.records.model_input import Experts

_CHOOSES_FREELY: Final = -1
"""Marker in place of an expert's index where the router chooses freely: at padding, and at the last token of a row,
whose state is not used."""
_CHOOSING: Final = (torch.topk, Tensor.topk)


class _ChoosingThese(TorchFunctionMode):
    """Torch function mode in which `topk` returns the scores and indices of recorded experts instead of the largest
    scores."""

    def __init__(self, chosen_LK: Tensor) -> None:
        super().__init__()
        self.answers = 0
        self._chosen_LK = chosen_LK

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- whatever the function returns
        output = function(*args, **(kwargs or {}))
        if function not in _CHOOSING:
            return output
        self.answers += 1
        router_LK = output.indices
        replayed_LK = self._chosen_LK.view_as(router_LK).to(router_LK.dtype)
        chosen_LK = torch.where(replayed_LK == _CHOOSES_FREELY, router_LK, replayed_LK)
        return torch.return_types.topk((args[0].gather(-1, chosen_LK), chosen_LK))


class ExpertReplay:
    """Control of a mixture of experts' routers: makes them use recorded experts in the next forward pass and its
    backward pass."""

    def __init__(self, model: nn.Module) -> None:
        modules = routers(model)
        self._experts, self._width = count_experts(model), chosen_width(modules)
        self._chosen_LF: Tensor | None = None
        begin = 0
        for router in modules:
            end = begin + chosen_width([router])
            router.forward = partial(self._route, router.forward, slice(begin, end))
            begin = end

    def set_choices(self, chosen_LF: Tensor | None) -> None:
        """Set the experts that routers must use for each token from now on, of shape (tokens, chosen experts of all
        routers). With None, routers choose freely."""
        self._chosen_LF = chosen_LF

    def lay_out(self, batch: MicroBatch, device: torch.device, *, shares: bool) -> Tensor:
        """Return the recorded experts of every token on the device, in the order in which the model processes the
        tokens. With `shares`, this is the order of the single row that stores shared prompts once. Raises Damaged if
        recorded experts are missing or do not fit the model."""
        chosen_BTF = np.full((*batch.tokens_BT.shape, self._width), _CHOOSES_FREELY, np.int32)
        for chosen_TF, each in zip(chosen_BTF, batch.inputs, strict=False):
            if each.experts is None and not len(each.trained_positions):
                continue
            problem = "none" if each.experts is None else self._find_problem(each.experts)
            if problem or each.experts is None:
                expected = f"{self._width} experts with numbers below {self._experts}"
                raise Damaged(
                    f"the recorded experts of a sample with {len(each)} tokens do not fit this model: each token "
                    f"needs {expected}, but the sample has {problem}. Restore the shard from a copy of the run, or "
                    "remove update.router_replay"
                )
            chosen_TF[: len(each.experts)] = each.experts
        chosen_LF: NDArray[np.int32] = chosen_BTF.reshape(-1, self._width)
        if shares and batch.shared is not None:
            chosen_LF = chosen_LF[batch.shared.places_L]
        return torch.from_numpy(chosen_LF).to(device)

    def _find_problem(self, experts: Experts) -> str:
        if experts.shape[1] != self._width:
            return f"{experts.shape[1]}"
        greatest = int(experts.max(initial=0))
        return "" if greatest < self._experts else f"expert {greatest}"

    def _route(self, forward: Callable[..., Routed], span: slice, *inputs: Any, **options: Any) -> Routed:  # noqa: ANN401
        if self._chosen_LF is None:
            return forward(*inputs, **options)
        with _ChoosingThese(self._chosen_LF[:, span]) as mode:
            output = forward(*inputs, **options)
        assert mode.answers == 1, f"a router that can be replayed calls topk once, this one did {mode.answers} times"
        return output


def can_replay(model: nn.Module) -> bool:
    """Return whether every mixture-of-experts router of a model chooses experts by exactly one call of `topk`, so that
    recorded choices can be imposed. The model may be on the `meta` device."""
    return all(map(_chooses_once, routers(model)))


@torch.no_grad()
def _chooses_once(router: nn.Module) -> bool:
    weight, top_k = cast(nn.Parameter, router.weight), getattr(router, "top_k", None)
    if top_k is None:
        return False
    biases = [weight.new_zeros(weight.shape[0]) for _ in [*signature(router.forward).parameters][1:]]
    with _ChoosingThese(torch.full((1, top_k), _CHOOSES_FREELY, device=weight.device)) as mode:
        try:
            output = router(weight.new_zeros(1, weight.shape[1]), *biases)
        except (RuntimeError, TypeError, AttributeError):  # the router reads or requires other inputs
            return False
    return mode.answers == 1 and len(output) == 3 and output[2].shape == (1, top_k)
