"""Configuration of importance corrections, which weight tokens by how much more likely the trainer finds them than the
policy that generated them. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.config import Since
from rheostat.infra.variants import Variant


class Correction(Variant):
    """Fields common to all importance corrections (of the difference between engine and trainer). `implementation`
    names a `rheostat.models.objectives.importance.CorrectionFunction`."""

    compares_with_trainer: ClassVar[bool] = True
    """Whether the trainer computes the log-probs of the policy before the update (old log-probs). If not, the log-probs
    that the engine recorded are used instead."""

    @property
    def compares_sequences(self) -> bool:
        """Whether the weight of a token depends on other tokens of its completion."""
        return False

    @property
    def moment_limit(self) -> float | None:
        """Maximum of the mean squared log-ratio over a minibatch, which outliers are masked to reach. None if the
        correction masks no outliers of a minibatch."""
        return None


class NoCorrection(Correction):
    """No correction: the engine's log-probs are used as old log-probs. The mismatch is still measured."""

    implementation = "rheostat.models.objectives.importance:uncorrected"
    compares_with_trainer = False

    kind: Literal["none"] = "none"


class RatioCorrection(Correction):
    """Fields common to corrections that weight the loss by the ratio π_old / π_behavior. The trainer computes π_old,
    and π_behavior is the probability that the engine recorded."""

    level: Annotated[Literal["token", "sequence", "geometric"], Since("0.2.0", before="token")] = "token"
    """Tokens that share a ratio: with "token" every token has a separate ratio. With "sequence" and "geometric", all
    tokens of a completion have the product or the geometric mean of the completion's token ratios. If each turn of an
    episode has a separate prompt, each turn is a completion here."""

    @property
    def compares_sequences(self) -> bool:
        """Whether the weight of a token depends on other tokens of its completion."""
        return self.level != "token"


class TruncatedImportance(RatioCorrection):
    """Loss weighted by min(π_old / π_behavior, cap), with π_behavior the probability that the engine recorded.

    The trainer computes π_old. Steps after the first use the engine's log-probs as π_old if both are equal up to
    rounding: with the transformers engine in float32, an update in float32, and no stale tokens.
    """

    implementation = "rheostat.models.objectives.importance:truncated"

    kind: Literal["truncated"] = "truncated"
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the weight π_old / π_behavior."""


class MaskedImportance(RatioCorrection):
    """Loss weighted by π_old / π_behavior, or by 0 if this ratio is not between `low` and `high`. The trainer computes
    π_old, and π_behavior is the probability that the engine recorded. For tokens this is IcePop (arXiv 2510.18855)."""

    implementation = "rheostat.models.objectives.importance:masked"

    kind: Literal["masked"] = "masked"
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Lowest ratio of the trainer's to the engine's probability with which a token is trained."""
    high: Annotated[float, Field(gt=1)] = 2.0
    """Highest ratio of the trainer's to the engine's probability with which a token is trained."""
    veto: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Since("0.2.0", before=None)] = None
    """Ratio of a single token below which no token of its completion is trained, such as 1e-4. If not set, a token
    outside `low` and `high` does not affect the other tokens (with level "token")."""

    @property
    def compares_sequences(self) -> bool:
        """Whether the weight of a token depends on other tokens of its completion."""
        return super().compares_sequences or self.veto is not None


class SecondMoment(Correction):
    """Loss weighted by the ratio π_old / π_behavior, or by 0 for the tokens of a minibatch with the largest squared
    log-ratios: as many as needed to bring the mean of the others down to `max_moment` (M2PO, arXiv 2510.01161).

    The trainer computes π_old for all minibatches before the first step, which costs one more forward pass for the
    first minibatch.
    """

    implementation = "rheostat.models.objectives.importance:second_moment"

    kind: Literal["second_moment"] = "second_moment"
    max_moment: Annotated[float, Field(gt=0)] = 0.04
    """Maximum of the mean squared log-ratio over the trained tokens of a minibatch."""

    @property
    def moment_limit(self) -> float | None:
        """Maximum of the mean squared log-ratio over a minibatch, which outliers are masked to reach."""
        return self.max_moment


CorrectionConfig = Annotated[
    NoCorrection | TruncatedImportance | MaskedImportance | SecondMoment, Field(discriminator="kind")
]
