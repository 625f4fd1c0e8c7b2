"""What an iteration leaves to the next: it stands in the seal, so the next one follows from the store alone."""

from pydantic import ConfigDict, Field, JsonValue

from infra.config import Settings
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.data.curriculum import Cursor, DynamicSamplingState
from tasks.run.keys import StageKey, iteration_key


class LeftoverGroups(Settings):
    """Informative groups of one scored shard that wait for the next iteration's credit."""

    rollouts: str
    """Key of the manifest of their rollouts."""
    scores: str
    """Key of the manifest of their scores."""
    rows: tuple[int, ...]
    """Their prompts."""


class PartialGroups(Settings):
    """Groups of one rollout shard that were cut and go on in the next iteration."""

    rollouts: str
    """Key of the manifest whose second shard holds them."""
    rows: tuple[int, ...]
    """Their prompts."""


class CarryOver(Settings):
    """What the next iteration begins with; seals call groups by the aliases."""

    model_config = ConfigDict(populate_by_name=True)

    cursor: Cursor = Cursor()
    """Where the stream of prompts stands."""
    sampling: DynamicSamplingState | None = None
    """State of dynamic sampling."""
    leftover_groups: tuple[LeftoverGroups, ...] = Field(default=(), alias="kept")
    """Those beyond the target."""
    partial_groups: tuple[PartialGroups, ...] = Field(default=(), alias="carried")
    """Those that were cut."""

    @property
    def num_leftover(self) -> int:
        """Prompts whose groups credit has already."""
        return sum(len(groups.rows) for groups in self.leftover_groups)

    @property
    def num_partial(self) -> int:
        """Prompts whose groups go on."""
        return sum(len(groups.rows) for groups in self.partial_groups)

    def rows(self) -> list[int]:
        """Prompts that the next iteration has already."""
        rows = [groups.rows for groups in self.leftover_groups] + [groups.rows for groups in self.partial_groups]
        return [row for some in rows for row in some]

    def detail(self) -> dict[str, JsonValue]:
        """The part of a seal's detail that carries it."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"cursor"}) | {
            "cursor": self.cursor.model_dump(mode="json")
        }


def carry_over_before(run: Run, number: int) -> CarryOver:
    """What iteration `number` begins with."""
    sealed = run.find(StageKey.of(iteration_key(number - 1), "seal")) if number > 1 else None
    if sealed is None:
        return CarryOver()
    names = {field.alias or name for name, field in CarryOver.model_fields.items()}
    return CarryOver.model_validate({name: value for name, value in sealed.detail.items() if name in names})


def partial_rows(rollouts: Manifest) -> tuple[int, ...]:
    """Prompts of the groups that a rollout shard cut."""
    rows = rollouts.detail["carried_rows"]
    assert isinstance(rows, list)
    return tuple(int(str(row)) for row in rows)


class SurplusGroups(Settings):
    """Informative groups of one scored shard beyond an iteration's target."""

    shard: int
    """Index among all that credit looked at."""
    rows: tuple[int, ...]
    """Their prompts."""


def surplus_groups(credit: Manifest) -> list[SurplusGroups]:
    """Informative groups beyond the target, as credit found them."""
    found = credit.detail.get("surplus", [])
    assert isinstance(found, list)
    return [SurplusGroups.model_validate(groups) for groups in found]
