"""Configuration of the KL penalty, which keeps the policy close to the reference: the initial policy, the policy at the
last reset, or a moving average of the policies. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rheostat.infra.config import Positive, Settings, Since


class AdaptiveKl(Settings):
    """Controller that adapts a KL coefficient so that the KL divergence stays close to a target (arXiv 1909.08593,
    section 2.2). Resuming a run restores the controller's state."""

    target: Annotated[float, Field(gt=0)]
    """Target of the KL divergence in nats per token."""
    horizon: Positive = 10_000
    """Time constant in completions. Each iteration multiplies the coefficient by exp(error x completions / horizon),
    where error is the relative error of the divergence, clipped to ±0.2."""


class ReferenceRule(Settings):
    """Rule for the reference of a KL penalty. By default it is always the initial policy."""

    reset_every: Annotated[Positive | None, Since("0.2.0", before=None)] = None
    """Number n of iterations after which the current policy becomes the reference (reference reset, ProRL, arXiv
    2505.24864, section 2.3). The reference of iteration i is the policy after iteration n x floor((i - 1) / n). If an
    alarm has reverted to an older policy since then, the restored policy is the reference. The optimizer state is not
    reset."""
    reset_after_plateau: Annotated[Positive | None, Since("0.2.0", before=None)] = None
    """After n iterations without a new best mean reward, the current policy becomes the reference. Counting restarts
    after a reset and after each new best. Use this or `reset_every`."""
    ema_decay: Annotated[float | None, Field(gt=0, lt=1), Since("0.2.0", before=None)] = None
    """Decay d of a reference that is an exponential moving average of the weights of the policies (TR-DPO, arXiv
    2404.09656, soft update with α = 1 - d and an update after every iteration). The reference of iteration 1 is the
    initial policy. The reference of iteration i + 1 is d x the reference of iteration i + (1 - d) x the policy after
    iteration i, in float32. After an alarm has reverted to an older policy, the reference is the one that was computed
    with this policy. Use this, `reset_every` or `reset_after_plateau`."""

    @model_validator(mode="after")
    def _check_rules(self) -> "ReferenceRule":
        keys = [key for key in ReferenceRule.model_fields if getattr(self, key)]
        if len(keys) > 1:
            raise ValueError(f"{' and '.join(keys)} are set. Remove all but one of them")
        return self

    @property
    def rule(self) -> "ReferenceRule":
        """Copy that contains only these settings, so that penalties of different types can be compared."""
        return ReferenceRule(**{key: getattr(self, key) for key in ReferenceRule.model_fields})

    @property
    def rule_key(self) -> str | None:
        """Key of the setting that changes the reference, or None if the reference is always the initial policy."""
        return next((key for key in ReferenceRule.model_fields if getattr(self, key)), None)


class NoKl(Settings):
    """No KL penalty in the loss, so no reference model is needed for it."""

    kind: Literal["none"] = "none"


class KlPenalty(ReferenceRule):
    """Penalty in the loss on the KL divergence of the policy from the reference, by default the initial policy."""

    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence per token: k1, k2 or k3 (Schulman, "Approximating KL divergence")."""
    coefficient: Annotated[float, Field(gt=0)] = 1e-3
    """Factor by which the divergence is multiplied in the loss. With `adaptive`, this is the initial factor."""
    adaptive: AdaptiveKl | None = None
    """Controller that changes the coefficient after each iteration. If not set, the coefficient is constant."""


Kl = Annotated[NoKl | KlPenalty, Field(discriminator="kind")]
