"""Configuration of soups: several policies, each for a mix of rewards, merged for any preference. Torch-free."""

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
"""Folder of a store in which records of soups lie beside the runs."""


def reason_against_beta(beta: float, num_rewards: int) -> str | None:
    """Say why a β mixes no rewards so that they can be told apart again; none where it does."""
    if 1 / num_rewards < beta <= 1:
        return None
    singular = ": at 1/N every backbone has the same reward, and B is singular" if beta * num_rewards == 1 else ""
    return f"beta {beta:g}: expected above 1/{num_rewards} and at most 1 for {num_rewards} terms{singular}"


class SoupConfig(Settings):
    """How `rheostat soup` makes a policy for every preference among rewards."""

    terms: Annotated[tuple[str, ...], Field(min_length=2, max_length=3)]
    """Names of the reward terms among which there are preferences; others keep their weight in every backbone."""
    method: SoupMethod = "bone"
    """`bone` trains backbones on mixed rewards, `rewarded` on one reward each, `oracle` a policy per preference;
    `direct` merges the backbones of `bone` by the preference itself, to compare with."""
    beta: float = 0.7
    """Share of a backbone's own reward in its mix, above 1/N and at most 1; for `bone` and `direct`."""
    candidates: tuple[float, ...] = ()
    """Values of beta of which hypervolume chooses one after a part of the iterations; none takes `beta`."""
    search_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Part of the iterations after which a candidate is chosen."""
    grid: Annotated[int, Field(ge=2, le=101)] = 11
    """Values that each share of a preference takes, from 0 to 1; each preference is evaluated."""
    corners: Literal["merge", "expert"] = "merge"
    """The policy for one reward alone: a merge as any other, or a policy that is trained on that reward alone."""
    extrapolate: Annotated[float, Field(ge=0)] = 0.0
    """How much further than the merge, away from the start: (1 + this) times the merge less this times the start."""
    statistics_prompts: Positive = 64
    """Held-out problems, with `rollout.group_size` completions each, from which the terms are standardised."""
    reference: float = -2.0
    """The worst standardised reward, of every term, from which hypervolume counts."""

    @model_validator(mode="after")
    def _backbones_differ(self) -> "SoupConfig":
        for beta in (self.beta, *self.candidates) if self.mixes else ():
            if (reason := reason_against_beta(beta, len(self.terms))) is not None:
                raise ValueError(reason)
        if len({*self.terms}) < len(self.terms) or len({*self.candidates}) < len(self.candidates):
            raise ValueError("expected each term and each candidate once")
        return self

    @property
    def mixes(self) -> bool:
        """Whether backbones are trained on mixes of rewards."""
        return self.method in ("bone", "direct")

    def reasons_against(self, scoring: ScoringConfig, update: UpdateConfig, data: DataSource) -> Iterator[str]:
        """Yield what does not go together with the run's other parts."""
        for term in self.terms:
            if term not in scoring.terms:
                known = ", ".join(scoring.terms)
                yield f"soup.terms: expected reward terms, {known}, found {term!r}{nearest(term, scoring.terms)}"
            elif term in scoring.process_terms:
                yield f"soup.terms: {term!r} values steps: only a number per completion can be standardised"
        made = data.heldout_known
        if made is not None and self.statistics_prompts > made:
            yield f"soup.statistics_prompts {self.statistics_prompts} exceeds data.heldout_problems {made}"
        if self.candidates and update.schedule != "constant":
            yield (
                f"soup.candidates with update.schedule {update.schedule!r}: a backbone goes on after the search, "
                "expected 'constant'"
            )
