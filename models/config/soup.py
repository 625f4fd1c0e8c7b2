"""Configuration of soups: policies trained on mixes of rewards, and merged for any preference among them.
Torch-free."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from infra.config import Positive, Settings
from infra.validation_errors import nearest
from models.config.data import DataSource
from models.config.objectives import UpdateConfig
from models.config.rewards import ScoringConfig

SoupMethod = Literal["bone", "direct", "rewarded", "oracle"]

SOUPS: Final = "soups"
"""Folder of a store that contains the records of soups, next to the runs."""


def find_beta_conflict(beta: float, num_rewards: int) -> str | None:
    """Return why a β mixes rewards in a way that cannot be inverted, or None if β is valid."""
    if 1 / num_rewards < beta <= 1:
        return None
    singular = (
        ". At 1/N all backbones have the same reward, and the matrix B is singular" if beta * num_rewards == 1 else ""
    )
    return f"beta is {beta:g}, but it must be above 1/{num_rewards} and at most 1 for {num_rewards} terms{singular}"


class SoupConfig(Settings):
    """Settings of `rheostat soup`, which makes one policy for every preference among rewards."""

    terms: Annotated[tuple[str, ...], Field(min_length=2, max_length=3)]
    """Names of the reward terms among which preferences are expressed. Other terms keep their weight in every backbone
    (a policy that is trained to be merged)."""
    method: SoupMethod = "bone"
    """Training method: `bone` trains backbones on mixed rewards, `rewarded` trains each on one reward, `oracle` trains
    one policy per preference. `direct` merges the backbones of `bone` with the preference itself as weights, for
    comparison."""
    beta: float = 0.7
    """Share of a backbone's own reward in its mix, above 1/N for N terms and at most 1. Used by `bone` and `direct`."""
    candidates: tuple[float, ...] = ()
    """Values of beta from which the one with the highest hypervolume is selected after a part of the iterations. If
    empty, `beta` is used."""
    search_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the iterations after which a candidate is selected."""
    grid: Annotated[int, Field(ge=2, le=101)] = 11
    """Number of values from 0 to 1 that each share of a preference takes. Each preference is evaluated."""
    corners: Literal["merge", "expert"] = "merge"
    """Policy for a preference for one reward alone: a merge like any other, or an expert that is trained on this reward
    alone."""
    extrapolate: Annotated[float, Field(ge=0)] = 0.0
    """Extrapolation factor e beyond the merge, away from the initial policy: (1 + e) x merge - e x initial policy."""
    statistics_prompts: Positive = 64
    """Number of held-out problems, with `rollout.group_size` completions each, used to standardize the terms."""
    reference: float = -2.0
    """Reference point of the hypervolume: worst standardized reward of every term."""

    @model_validator(mode="after")
    def _check_backbones(self) -> "SoupConfig":
        for beta in (self.beta, *self.candidates) if self.mixes else ():
            if (reason := find_beta_conflict(beta, len(self.terms))) is not None:
                raise ValueError(reason)
        if len({*self.terms}) < len(self.terms) or len({*self.candidates}) < len(self.candidates):
            raise ValueError("each term and each candidate may be listed only once. Remove the repetition")
        return self

    @property
    def mixes(self) -> bool:
        """Whether backbones are trained on mixes of rewards."""
        return self.method in ("bone", "direct")

    def find_conflicts(self, scoring: ScoringConfig, update: UpdateConfig, data: DataSource) -> Iterator[str]:
        """Yield one line per conflict with the run's rewards, update or data."""
        for term in self.terms:
            if term not in scoring.terms:
                names = ", ".join(scoring.terms)
                yield f"soup.terms: there is no reward {term!r}. Use {names}{nearest(term, scoring.terms)}"
            elif term in scoring.process_terms:
                yield f"soup.terms: {term!r} scores steps, but only scores of whole completions can be standardized"
        num_heldout = data.num_heldout_problems
        if num_heldout is not None and self.statistics_prompts > num_heldout:
            yield (
                f"soup.statistics_prompts is {self.statistics_prompts}, but data.heldout_problems is {num_heldout}. "
                "Lower it"
            )
        if self.candidates and update.schedule != "constant":
            yield (
                f"soup.candidates cannot be combined with update.schedule = {update.schedule!r}, because a backbone is "
                "trained further after the search. Use 'constant'"
            )
