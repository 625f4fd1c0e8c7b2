"""Configuration of soups. A soup trains several policies on different mixes of rewards and merges their weights for any
preference among the rewards. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from rheostat.infra.config import Positive, Settings
from rheostat.infra.validation_errors import nearest
from rheostat.models.config.data import DataSource
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.rewards import ScoringConfig

SoupMethod = Literal["bone", "direct", "rewarded", "oracle"]

SOUPS: Final = "soups"
"""Name of the folder in a store that contains the records of soups (sets of merged policies), next to the runs."""


def find_beta_conflict(beta: float, num_rewards: int) -> str | None:
    """Return the reason why `beta` is invalid as `SoupConfig.beta` for this number of rewards, or None if it is
    valid."""
    if 1 / num_rewards < beta <= 1:
        return None
    singular = (
        ". With 1/N, every policy would be trained on the same mix of rewards, so a merge of the policies could not "
        "follow a preference"
        if beta * num_rewards == 1
        else ""
    )
    return f"beta is {beta:g}, but for {num_rewards} terms it must be above 1/{num_rewards} and at most 1{singular}"


class SoupConfig(Settings):
    """Settings for `rheostat soup`, which produces one policy for every preference: a weighting of two or three
    rewards. The policies are merges of a few trained policies, called backbones."""

    terms: Annotated[tuple[str, ...], Field(min_length=2, max_length=3)]
    """Names of the two or three reward terms that preferences weight against each other. Other terms keep their
    configured weight in the training of every backbone (policy that is trained to be merged)."""
    method: SoupMethod = "bone"
    """Training method. `bone` trains each backbone on a mix of all rewards, and `rewarded` trains each backbone on one
    reward. `oracle` trains a separate policy for each preference and merges nothing. `direct` is a baseline for
    comparison: it merges the backbones of `bone` with the preference itself as weights."""
    beta: float = 0.7
    """Weight of the main reward in the mix of rewards on which a backbone (policy that is trained to be merged) is
    trained. Each backbone has another main reward, and the other rewards share 1 - beta equally. Must be above 1/N for
    N rewards, and at most 1. Used by the methods `bone` and `direct`."""
    candidates: tuple[float, ...] = ()
    """Values of `beta` to try. After `search_share` of the iterations, the value whose policies have the highest
    hypervolume is selected, and only its backbones are trained further. If empty, `beta` is used."""
    search_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the iterations after which one of the values in `candidates` is selected."""
    grid: Annotated[int, Field(ge=2, le=101)] = 11
    """Number of evenly spaced weights from 0 to 1 that a reward can have in a preference. A policy is evaluated for
    every combination of these weights that sums to 1."""
    corners: Literal["merge", "expert"] = "merge"
    """Policy for a preference that gives the whole weight to one reward: "merge" is a merge of the backbones, as for
    every other preference, "expert" is a policy that was trained on this reward alone."""
    extrapolate: Annotated[float, Field(ge=0)] = 0.0
    """Factor e by which the merged weights are moved away from the initial policy: (1 + e) x merge - e x initial
    policy."""
    statistics_prompts: Positive = 64
    """Number of held-out problems on which the mean and the standard deviation of each reward are estimated, to
    standardize the rewards. Each problem gets `rollout.group_size` completions."""
    reference: float = -2.0
    """Coordinate of the reference point from which the hypervolume is measured, the same for every reward. It is a
    standardized reward that counts as the worst: a reward below it contributes nothing."""

    @model_validator(mode="after")
    def _check_backbones(self) -> "SoupConfig":
        for beta in (self.beta, *self.candidates) if self.mixes else ():
            if (reason := find_beta_conflict(beta, len(self.terms))) is not None:
                raise ValueError(reason)
        if len({*self.terms}) < len(self.terms) or len({*self.candidates}) < len(self.candidates):
            raise ValueError("soup.terms and soup.candidates must not contain a value twice. Remove the repetition")
        return self

    @property
    def mixes(self) -> bool:
        """Whether backbones are trained on mixes of rewards. This is the case for the methods `bone` and `direct`."""
        return self.method in ("bone", "direct")

    def find_conflicts(self, scoring: ScoringConfig, update: UpdateConfig, data: DataSource) -> Iterator[str]:
        """Yield one message for each conflict of these settings with the rewards, the update or the data of the
        runs."""
        for term in self.terms:
            if term not in scoring.terms:
                names = ", ".join(scoring.terms)
                yield f"soup.terms: there is no reward {term!r}. Use {names}{nearest(term, scoring.terms)}"
            elif term in scoring.process_terms:
                yield (
                    f"soup.terms contains {term!r}, which scores steps, but a soup can only standardize scores of "
                    "whole completions. Remove it from soup.terms"
                )
        num_heldout = data.num_heldout_problems
        if num_heldout is not None and self.statistics_prompts > num_heldout:
            yield (
                f"soup.statistics_prompts is {self.statistics_prompts}, but data.options.heldout_problems is "
                f"{num_heldout}. Lower the first, or raise the second"
            )
        if self.candidates and update.schedule != "constant":
            yield (
                f"soup.candidates cannot be combined with update.schedule = {update.schedule!r}, because training "
                "continues after one of the candidates was selected. Set update.schedule = 'constant'"
            )
