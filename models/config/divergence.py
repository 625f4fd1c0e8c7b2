"""Configuration of the KL penalty, which keeps the policy close to the reference: the initial policy, or the policy at
the last reset. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field

from rheostat.infra.config import Positive, Settings, Since


class AdaptiveKl(Settings):
    """Controller that adapts a KL coefficient so that the KL divergence stays close to a target (arXiv 1909.08593,
    section 2.2). Resuming a run restores the controller's state."""

    target: Annotated[float, Field(gt=0)]
    """Target of the KL divergence in nats per token."""
    horizon: Positive = 10_000
    """Time constant in completions. Each iteration multiplies the coefficient by exp(error x completions / horizon),
    where error is the relative error of the divergence, clipped to ±0.2."""


class ReferenceReset(Settings):
    """Setting for the reference of a KL penalty."""

    reset_every: Annotated[Positive | None, Since("0.2.0", before=None)] = None
    """Number n of iterations after which the reference is replaced by the current policy (reference reset, ProRL, arXiv
    2505.24864, section 2.3). The reference of iteration i is the policy after iteration n x floor((i - 1) / n), or the
    restored policy if an alarm has reverted to an older one since then. The optimizer state is not reset. If not set,
    the reference is always the initial policy."""


class NoKl(Settings):
    """No KL penalty in the loss, so no reference model is needed for it."""

    kind: Literal["none"] = "none"


class KlPenalty(ReferenceReset):
    """Penalty in the loss on the KL divergence of the policy from the reference, by default the initial policy."""

    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence per token: k1, k2 or k3 (Schulman, "Approximating KL divergence")."""
    coefficient: Annotated[float, Field(gt=0)] = 1e-3
    """Factor by which the divergence is multiplied in the loss. With `adaptive`, this is the initial factor."""
    adaptive: AdaptiveKl | None = None
    """Controller that changes the coefficient after each iteration. If not set, the coefficient is constant."""


Kl = Annotated[NoKl | KlPenalty, Field(discriminator="kind")]
