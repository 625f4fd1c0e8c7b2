"""Losses on finished pictures of a text-to-image policy, to which new noise is added (the forward process of a flow).

With flow matching, a picture x0 at the noise level t is x_t = (1 − t)·x0 + t·ε with the noise ε, and the policy
predicts the velocity v = ε − x0. The picture predicted from x_t is x_t − t·v̂, so the error of this picture is
t·(v − v̂), which is linear in the predicted velocity v̂. The losses need only these errors.

Shapes: N noised pictures of one micro-batch, D latents of a picture.
"""

from typing import Any, Final, Protocol

from torch import Tensor

from rheostat.models.config.policy_losses import DiffusionNft

MIN_ERROR: Final = 1e-5
"""Lower bound of the mean absolute error by which a squared error is divided, as in the authors' code of
DiffusionNFT."""


class ForwardProcessLoss(Protocol):
    """Pure function that computes a loss for each noised picture. The loss has a gradient only with respect to
    `errors_ND`."""

    def __call__(
        self,
        errors_ND: Tensor,
        old_ND: Tensor,
        /,
        *,
        advantages_N: Tensor,
        config: Any,  # noqa: ANN401 -- the loss's own class
    ) -> Tensor:
        """Return the loss of each noised picture (N). `errors_ND` are the errors of the pictures that the policy in
        training predicts, `old_ND` are those of the policy before the update, and `config` contains the settings of
        the loss."""
        ...


def diffusion_nft(errors_ND: Tensor, old_ND: Tensor, *, advantages_N: Tensor, config: DiffusionNft) -> Tensor:
    """Return r·E(v⁺) + (1 − r)·E(v⁻) for each noised picture, times `advantage_clip` / β (DiffusionNFT, arXiv
    2509.16117). E is the squared error of the predicted picture divided by its mean absolute error, which has no
    gradient.

    The positive velocity is v⁺ = (1 − β)·v_old + β·v, the negative velocity is v⁻ = (1 + β)·v_old − β·v, and r is the
    advantage divided by `advantage_clip` and moved from [-1, 1] to [0, 1]. With the factor, which the authors' code
    has too, the gradient at v = v_old is advantage times gradient of E(v), for any β and for advantages within the
    clip range.
    """
    positive_N = 0.5 + (advantages_N / config.advantage_clip).clamp(-1, 1) / 2
    toward_N = normalized_square((1 - config.beta) * old_ND + config.beta * errors_ND)
    away_N = normalized_square((1 + config.beta) * old_ND - config.beta * errors_ND)
    return (positive_N * toward_N + (1 - positive_N) * away_N) * (config.advantage_clip / config.beta)


def normalized_square(errors_ND: Tensor) -> Tensor:
    """Return the mean squared error of each picture, divided by the mean absolute error, which has no gradient (N)."""
    return errors_ND.square().mean(1) / errors_ND.detach().abs().mean(1).clamp(min=MIN_ERROR)
