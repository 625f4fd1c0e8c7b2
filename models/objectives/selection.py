"""Selection of tokens by the covariance of log-prob and advantage, over the whole minibatch of an optimizer step.

Every rank knows the behavior log-probs and advantages of all samples before the first step. The selection is therefore
the same on every rank and for every division into micro-batches. Shapes: M trained tokens of a minibatch.
"""

from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rheostat.models.config.policy_losses import ClipCov, KlCov
from rheostat.models.records.columns import Mask


class SelectionFunction(Protocol):
    """Function that selects the tokens of a minibatch that a policy loss treats separately. `select_tokens` of
    `rheostat.models.training.selections` calls it once per minibatch, before the first optimizer step."""

    def __call__(
        self,
        logprobs_M: NDArray[np.float32],
        advantages_M: NDArray[np.float32],
        /,
        *,
        config: Any,  # noqa: ANN401 -- the loss's own class
        rng: Random,
    ) -> Mask:
        """Return the mask of the selected tokens (M). `logprobs_M` are the behavior log-probs, `config` contains the
        settings of the loss, and `rng` is seeded by run, iteration and minibatch."""
        ...


def covariances(logprobs_M: NDArray[np.float32], advantages_M: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the contribution of each token to the covariance of log-prob and advantage (M): the product of both
    deviations from the mean of the minibatch (arXiv 2505.22617)."""
    values_M = np.ones(len(logprobs_M), np.float64)
    for factors_M in (logprobs_M, advantages_M):
        values_M *= factors_M - factors_M.mean(dtype=np.float64)
    return values_M


def select_randomly(
    logprobs_M: NDArray[np.float32], advantages_M: NDArray[np.float32], *, config: ClipCov, rng: Random
) -> Mask:
    """Select a fraction of all tokens at random, but at least one if possible, among those whose covariance is between
    `config.covariance_low` and `config.covariance_high` (Clip-Cov, arXiv 2505.22617)."""
    values_M = covariances(logprobs_M, advantages_M)
    candidates = np.flatnonzero((values_M > config.covariance_low) & (values_M < config.covariance_high)).tolist()
    count = max(1, int(config.fraction * len(values_M)))
    return _mask(rng.sample(candidates, min(count, len(candidates))), len(values_M))


def select_largest(
    logprobs_M: NDArray[np.float32], advantages_M: NDArray[np.float32], *, config: KlCov, rng: Random
) -> Mask:
    """Select the fraction of tokens with the largest covariance, but at least one token (KL-Cov, arXiv 2505.22617).
    Among equal covariances, the first tokens are selected."""
    values_M = covariances(logprobs_M, advantages_M)
    count = max(1, int(config.fraction * len(values_M)))
    return _mask(np.argsort(-values_M, kind="stable")[:count].tolist(), len(values_M))


def _mask(places: list[int], length: int) -> Mask:
    mask_M = np.zeros(length, np.bool_)
    mask_M[places] = True
    return mask_M
