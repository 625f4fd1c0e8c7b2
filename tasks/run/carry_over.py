"""What an iteration leaves to the next: it stands in the seal, so the next one follows from the store alone."""

from collections.abc import Sequence

from pydantic import JsonValue

from infra.config import Settings
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.data.curriculum import Cursor, give_back
from models.rollouts.dynamic_sampling import DynamicSamplingState
from tasks.run.batch import BatchPlan
from tasks.run.keys import StageKey, iteration_key


class KeptGroups(Settings):
    """Groups of one scored shard that wait for the next iteration's credit."""

    rollouts: str
    """Key of the manifest of their rollouts."""
    scores: str
    """Key of the manifest of their scores."""
    rows: tuple[int, ...]
    """Their prompts."""


class CarriedGroups(Settings):
    """Groups of one rollout shard that were cut and go on in the next iteration."""

    rollouts: str
    """Key of the manifest whose second shard holds them."""
    rows: tuple[int, ...]
    """Their prompts."""


class CarryOver(Settings):
    """What the next iteration begins with."""

    cursor: Cursor = Cursor()
    """Where the stream of prompts stands."""
    sampling: DynamicSamplingState | None = None
    """State of dynamic sampling."""
    kept: tuple[KeptGroups, ...] = ()
    """Informative groups beyond the target."""
    carried: tuple[CarriedGroups, ...] = ()
    """Groups that were cut."""

    def rows(self) -> set[int]:
        """Prompts that the next iteration has already."""
        rows = [groups.rows for groups in self.kept] + [groups.rows for groups in self.carried]
        return {row for some in rows for row in some}

    def detail(self) -> dict[str, JsonValue]:
        """The part of a seal's detail that carries it."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"cursor"}) | {
            "cursor": self.cursor.model_dump(mode="json")
        }


def carry_over_before(run: Run, number: int) -> CarryOver:
    """What iteration `number` begins with."""
    sealed = run.find(StageKey.of(iteration_key(number - 1), "seal")) if number > 1 else None
    if sealed is None:
        return CarryOver()
    detail = {name: value for name, value in sealed.detail.items() if name in CarryOver.model_fields}
    return CarryOver.model_validate(detail)


def handover_after(
    before: CarryOver,
    waves: Sequence[BatchPlan],
    *,
    rollouts: Sequence[Manifest],
    scores: Sequence[Manifest],
    credit: Manifest,
    keep_surplus: bool,
    dynamic: bool,
) -> CarryOver:
    """What an iteration leaves, from its manifests; groups that were kept once are not kept again."""
    cursor = waves[-1].cursor
    assert cursor is not None, "an iteration's batches have a cursor"
    kept: list[KeptGroups] = []
    returned: list[int] = []
    for surplus in leftover_groups_of(credit):
        rows, new = surplus.rows, surplus.shard - len(before.kept)  # credit looks at the kept groups first
        if keep_surplus and new >= 0:
            kept.append(KeptGroups(rollouts=rollouts[new].key, scores=scores[new].key, rows=rows))
        else:
            returned += rows
    carried = [CarriedGroups(rollouts=m.key, rows=carried_rows(m)) for m in rollouts if len(m.shards) > 1]
    sampling = None
    if dynamic:
        issued = sum(int(manifest.metrics["groups"]) for manifest in rollouts)
        informative = sum(int(manifest.metrics["informative_groups"]) for manifest in scores)
        sampling = (before.sampling or DynamicSamplingState()).after(issued, informative)
    return CarryOver(
        cursor=give_back(cursor, returned),
        sampling=sampling,
        kept=tuple(kept),
        carried=tuple(carried),
    )


def carried_rows(rollouts: Manifest) -> tuple[int, ...]:
    """Prompts of the groups that a rollout shard cut."""
    rows = rollouts.detail["carried_rows"]
    assert isinstance(rows, list)
    return tuple(int(str(row)) for row in rows)


class LeftoverGroups(Settings):
    """Informative groups of one scored shard that were not needed."""

    shard: int
    """Index among the kept shards and, behind them, the iteration's own."""
    rows: tuple[int, ...]
    """Their prompts."""


def leftover_groups_of(credit: Manifest) -> list[LeftoverGroups]:
    """Informative groups beyond the target, as credit found them."""
    found = credit.detail.get("surplus", [])
    assert isinstance(found, list)
    return [LeftoverGroups.model_validate(groups) for groups in found]
