"""How many problems a comparison of two policies takes, and what so many can see. Torch-free."""

from math import ceil, sqrt
from typing import Literal

from pydantic import computed_field

from infra.config import Settings
from infra.errors import BadInput
from infra.statistics import normal_quantile

POWER = 0.8
"""Usual chance of seeing a gain that is there."""
DISCORDANT = 0.2
"""Share of problems on which exactly one of two policies is right, where nothing has been measured yet."""


class RulePower(Settings):
    """What a rule of a gate can show."""

    rule: str
    """The suite, and its term where the rule names one."""
    kind: Literal["primary", "guard"]
    """Whether a gain is to be shown, or that there is no loss."""
    problems: int
    """Of the suite."""
    asked: float
    """The gain, or the margin, that the rule names; 0 for any gain."""
    discordant: float
    """Share of problems that tells the two policies apart, measured the last time or 0.2."""
    alpha: float
    """Level of the rule."""

    @computed_field  # type: ignore[prop-decorator]  # of pydantic, which mypy does not follow
    @property
    def needed(self) -> int:
        """Problems that show what is asked with power 0.8; 0 where any gain will do."""
        return problems_needed(self.asked, self.discordant, alpha=self.alpha) if self.asked else 0

    @computed_field  # type: ignore[prop-decorator]  # of pydantic, which mypy does not follow
    @property
    def shown(self) -> float:
        """The smallest gain, or loss that is excluded, that these problems show with power 0.8."""
        return smallest_gain(self.problems, self.discordant, alpha=self.alpha)

    @computed_field  # type: ignore[prop-decorator]  # of pydantic, which mypy does not follow
    @property
    def is_short(self) -> bool:
        """Whether there are fewer problems than are needed."""
        return self.needed > self.problems

    def text(self) -> str:
        """Say in a line what the problems show."""
        what = "a gain" if self.kind == "primary" else "that nothing is lost but"
        line = f"{self.rule}: {self.problems:,} problems show {what} {self.shown:.3f} with power {POWER:g}"
        if self.is_short:
            line += f", not {self.asked:g}, which takes {self.needed:,}"
        return f"{line} (level {self.alpha:g}, {self.discordant:.0%} of problems differ)"


def problems_needed(gain: float, discordant: float, *, alpha: float, power: float = POWER) -> int:
    """Count the problems that show such a gain at level alpha with this power (Connor 1987, of McNemar's test).

    `discordant` is the share of problems on which exactly one of the two policies is right; of graded scores, the mean
    square of the differences. Raises BadInput where no problems could.

    >>> problems_needed(0.05, 0.2, alpha=0.05), problems_needed(0.05, 0.2, alpha=0.01)
    (493, 801)
    """
    if gain <= 0 or discordant < gain**2:
        raise BadInput(f"expected a gain above 0 and at most {sqrt(max(0.0, discordant)):g}, found {gain:g}")
    z_alpha, z_beta = _quantiles(alpha, power)
    return ceil((z_alpha * sqrt(discordant) + z_beta * sqrt(discordant - gain**2)) ** 2 / gain**2)


def smallest_gain(problems: int, discordant: float, *, alpha: float, power: float = POWER) -> float:
    """Say which gain so many problems show at level alpha with this power: `problems_needed` solved for the gain.

    No gain exceeds `discordant` where scores are 0 or 1: so few problems then see none.

    >>> round(smallest_gain(493, 0.2, alpha=0.05), 4)
    0.05
    """
    z_alpha, z_beta = _quantiles(alpha, power)
    if problems <= z_alpha**2:
        raise BadInput(f"expected more than {z_alpha**2:.1f} problems at alpha {alpha:g}, found {problems}")
    # (Δ√n − z_α√δ)² = z_β²(δ − Δ²), its larger root.
    root = z_beta * sqrt(problems - z_alpha**2 + z_beta**2)
    return sqrt(discordant) * (z_alpha * sqrt(problems) + root) / (problems + z_beta**2)


def _quantiles(alpha: float, power: float) -> tuple[float, float]:
    if not (0 < alpha < 0.5 and 0.5 <= power < 1):
        raise BadInput(f"expected alpha in (0, 0.5) and power in [0.5, 1), found {alpha:g} and {power:g}")
    return float(normal_quantile(1 - alpha)), float(normal_quantile(power))
