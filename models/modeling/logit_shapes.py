"""Functions that models apply to the output of their head: a scale (Granite, Cohere) or a soft cap (Gemma).

A trial detects them: logits = cap · tanh(scale · raw / cap), or scale · raw for an infinite cap. Soft caps are those of
Gemma 2 (arXiv 2408.00118, section 2). Shapes: T tokens, V vocabulary.
"""

from math import inf, isfinite
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_TRIAL_OUTPUTS: Final = (2.0**-14, 1.0, -3.0, 10.0, -30.0, 100.0, 1000.0, 2.0**26)
"""Numbers that replace the head's output in the trial that detects a scale and a soft cap. The first is so small that
only the scale affects it, the last so large that only the cap does."""


class LogitShape(NamedTuple):
    """Function that a model applies to the output of its head to get logits: a scale, followed by a soft cap (tanh)."""

    scale: float = 1.0
    cap: float = inf

    def apply(self, raw: Tensor) -> Tensor:
        """Return the logits for the raw output of the head, of any shape."""
        scaled = raw if self.scale == 1 else raw * self.scale
        return scaled if self.cap == inf else self.cap * torch.tanh(scaled / self.cap)

    def compute_derivative(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the logits with respect to the head output, given the logits."""
        return self.scale if self.cap == inf else self.scale * (1 - (logits / self.cap).square())


@torch.no_grad()
def logit_shape(model: PreTrainedModel, head: nn.Linear, tokens_1T: Tensor) -> LogitShape | None:
    """Return the scale and soft cap that a model applies to the output of its head, or None if the model applies any
    other function. They are found by replacing the head's output with chosen numbers and comparing the model's logits
    with these numbers. `tokens_1T` is any short input."""
    size = head.out_features
    tried_V = torch.tensor(_TRIAL_OUTPUTS, device=tokens_1T.device).repeat(-(-size // len(_TRIAL_OUTPUTS)))[:size]
    put = head.register_forward_hook(lambda *_: tried_V.expand(*tokens_1T.shape, size))
    try:
        logits_V = model(input_ids=tokens_1T, use_cache=False).logits[0, -1].float()
    finally:
        put.remove()
    scale, last = float(logits_V[0] / _TRIAL_OUTPUTS[0]), float(logits_V[len(_TRIAL_OUTPUTS) - 1])
    if not scale or not isfinite(scale):
        return None
    exact = round(scale, 6)
    shape = LogitShape(exact if abs(exact / scale - 1) < 1e-6 else scale)
    if abs(last / (scale * _TRIAL_OUTPUTS[-1]) - 1) > 0.5:
        shape = shape._replace(cap=last)
    return shape if torch.allclose(shape.apply(tried_V), logits_V, rtol=1e-4, atol=1e-6) else None
