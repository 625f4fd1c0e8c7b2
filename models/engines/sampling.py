"""Sampling of the next token from logits, with random numbers that depend only on the completion's seed.

Shapes: B rows, V vocabulary, T random numbers of one completion.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rheostat.models.config.engines import SamplingConfig
from rheostat.models.vision.tower import mask_tokens

MAX_ELEMENTS: Final = 1 << 24
"""Maximum number of float64 values that are processed at once: 128 MB, so that a large vocabulary fits next to the
model."""


def sample_uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """Return `count` uniform random numbers in [0, 1) for a seed. If `count` is larger, the additional numbers follow
    the same ones.

    The raw words of Philox are used, because NumPy guarantees them for all versions, unlike the results of
    `Generator.random`.
    """
    words = np.random.Philox(key=seed).random_raw(count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: SamplingConfig, *, banned: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, given logits and one uniform random number per row. Returns the tokens and their
    log-probs in float32. Banned tokens have probability 0.

    The log-probs are those of the untruncated softmax at the sampling temperature, or at temperature 1 if it is 0. The
    token of a row depends only on that row's logits and uniform random number.
    """
    rows = max(1, MAX_ELEMENTS // logits_BV.shape[1])
    parts = [
        _draw(mask_tokens(logits_BV[start : start + rows].double(), banned), uniforms_B[start : start + rows], sampling)
        for start in range(0, len(logits_BV), rows)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits_BV: Tensor, uniforms_B: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    scaled_BV = logits_BV / (sampling.temperature or 1.0)
    shifted_BV = scaled_BV - scaled_BV.amax(dim=1, keepdim=True)
    weights_BV = shifted_BV.exp()
    if sampling.temperature == 0:
        tokens_B = logits_BV.argmax(dim=1)
    elif sampling.top_k or sampling.top_p < 1:
        tokens_B = _sample_truncated(weights_BV, uniforms_B, sampling)
    else:
        tokens_B = _sample(weights_BV, uniforms_B)
    chosen_B = shifted_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B, (chosen_B - weights_BV.sum(dim=1).log()).float()


def _sample(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Sample one token per row from unnormalized weights over the vocabulary by inverting the cumulative distribution
    at the uniform random numbers. A token of weight 0 is never sampled."""
    cumulative_BV = weights_BV.cumsum(dim=1)
    total_B1 = cumulative_BV[:, -1:].contiguous()
    picked_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * total_B1, right=True)
    # A uniform just below 1, multiplied by the total, can round to the total, which no entry exceeds.
    last_B1 = torch.searchsorted(cumulative_BV, total_B1)
    return torch.minimum(picked_B1, last_B1).squeeze(1)


def _sample_truncated(weights_BV: Tensor, uniforms_B: Tensor, sampling: SamplingConfig) -> Tensor:
    """Sample from the `top_k` most likely tokens, reduced to the smallest set with `top_p` of their total weight.

    Tokens of equal weight are ordered by their ID.
    """
    sorted_BV, order_BV = weights_BV.sort(dim=1, descending=True, stable=True)
    if sampling.top_k:
        sorted_BV[:, sampling.top_k :] = 0
    if sampling.top_p < 1:
        cumulative_BV = sorted_BV.cumsum(dim=1)
        nucleus_B1 = sampling.top_p * cumulative_BV[:, -1:]
        # Keep a token if the tokens before it weigh less than `top_p`, so the most likely token always stays.
        sorted_BV[:, 1:] = sorted_BV[:, 1:].masked_fill(cumulative_BV[:, :-1] >= nucleus_B1, 0)
    return order_BV.gather(1, _sample(sorted_BV, uniforms_B)[:, None]).squeeze(1)
