"""Router replay: the experts that were chosen when completions were sampled are chosen again in passes of training.

Rollout routing replay (R3, arXiv 2510.11370): where engine and trainer round otherwise, or weights have
moved since, routers would choose others, and log-probs jump. What is replayed is the choice alone. A router weighs the
experts that it is given by its own logits, as its family does, so it goes on to learn.

Nearly every `TopKRouter` of transformers chooses by one call of `topk` and makes weights of the scores of what that
answers: the answer is what is replaced, and `can_replay` tells the other families. Shapes: B rows, T padded width, L
tokens of a pass, K experts that a router chooses, F that all routers choose.
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

from infra.errors import Damaged
from models.modeling.experts import Routed, chosen_width, count_experts, routers
from models.modeling.layout import MicroBatch
from models.records.model_input import Experts

_OWN: Final = -1
"""Stands for an expert that the router chooses itself: of padding, and of last tokens, after which nothing is read."""
_CHOOSING: Final = (torch.topk, Tensor.topk)


class _ChoosingThese(TorchFunctionMode):
    """Answers `topk` with the scores of given experts."""

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
        said = function(*args, **(kwargs or {}))
        if function not in _CHOOSING:
            return said
        self.answers += 1
        own_LK = said.indices
        given_LK = self._chosen_LK.view_as(own_LK).to(own_LK.dtype)
        chosen_LK = torch.where(given_LK == _OWN, own_LK, given_LK)
        return torch.return_types.topk((args[0].gather(-1, chosen_LK), chosen_LK))


class ExpertReplay:
    """The experts that a model's routers are to choose in the pass that was begun last; its backward pass is one."""

    def __init__(self, model: nn.Module) -> None:
        found = routers(model)
        self._experts, self._width = count_experts(model), chosen_width(found)
        self._chosen_LF: Tensor | None = None
        begin = 0
        for router in found:
            end = begin + chosen_width([router])
            router.forward = partial(self._route, router.forward, slice(begin, end))
            begin = end

    def begin(self, chosen_LF: Tensor | None) -> None:
        """Have routers choose these from now on; with none, they choose themselves."""
        self._chosen_LF = chosen_LF

    def lay_out(self, batch: MicroBatch, device: torch.device, *, shares: bool) -> Tensor:
        """Bring what was chosen to the device, for every token that the pass reads. Raises Damaged where it is not."""
        chosen_BTF = np.full((*batch.tokens_BT.shape, self._width), _OWN, np.int32)
        for chosen_TF, each in zip(chosen_BTF, batch.inputs, strict=False):
            if each.experts is None and not len(each.written):
                continue
            found = "none" if each.experts is None else self._wrong(each.experts)
            if found or each.experts is None:
                expected = f"{self._width} experts of each token, below {self._experts}"
                raise Damaged(f"sample of {len(each)} tokens, to be replayed: expected {expected}; found {found}")
            chosen_TF[: len(each.experts)] = each.experts
        chosen_LF: NDArray[np.int32] = chosen_BTF.reshape(-1, self._width)
        if shares and batch.shared is not None:
            chosen_LF = chosen_LF[batch.shared.places_L]
        return torch.from_numpy(chosen_LF).to(device)

    def _wrong(self, experts: Experts) -> str:
        if experts.shape[1] != self._width:
            return f"{experts.shape[1]}"
        greatest = int(experts.max(initial=0))
        return "" if greatest < self._experts else f"expert {greatest}"

    def _route(self, forward: Callable[..., Routed], own: slice, *read: Any, **options: Any) -> Routed:  # noqa: ANN401
        if self._chosen_LF is None:
            return forward(*read, **options)
        with _ChoosingThese(self._chosen_LF[:, own]) as mode:
            said = forward(*read, **options)
        assert mode.answers == 1, f"a router that can be replayed calls topk once, this one did {mode.answers} times"
        return said


def can_replay(model: nn.Module) -> bool:
    """Whether every router of a model, which may be on the meta device, chooses by one call of `topk`."""
    return all(map(_chooses_once, routers(model)))


@torch.no_grad()
def _chooses_once(router: nn.Module) -> bool:
    weight, chosen = cast(nn.Parameter, router.weight), getattr(router, "top_k", None)
    if chosen is None:
        return False
    biases = [weight.new_zeros(weight.shape[0]) for _ in [*signature(router.forward).parameters][1:]]
    with _ChoosingThese(torch.full((1, chosen), _OWN, device=weight.device)) as mode:
        try:
            said = router(weight.new_zeros(1, weight.shape[1]), *biases)
        except (RuntimeError, TypeError, AttributeError):  # it reads, or asks for, something else
            return False
    return mode.answers == 1 and len(said) == 3 and said[2].shape == (1, chosen)
