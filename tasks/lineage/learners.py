"""Search for promoted policies that were trained on certain prompts, for example before a user's data is deleted.
The result lists the runs and iterations that used the prompts."""

import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.store.registry import Registry, open_registry, registries
from rheostat.infra.store.runs import Run, list_runs, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.tombstones import WHOLE_RUN, deleted_parts
from rheostat.tasks.lineage.versions import ancestry
from rheostat.tasks.promotion.draft import read_draft, trained_ids_key
from rheostat.tasks.run.batch import iterations_without_rollouts
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import PROMPTS, SFT, StageKey, iteration_key
from rheostat.tasks.run.rescorings import iterations_text
from rheostat.tasks.views.metrics import sealed_iterations

PROMPT_ID = re.compile(r"[0-9a-f]{16}")


class PromptUsage(Settings):
    """Report of how one run used the prompts that the user searched for."""

    run: str
    """Name of the run."""
    prompts: int
    """Number of the searched prompts that are in the run's training data."""
    iterations: tuple[int, ...] = ()
    """Numbers of the iterations that generated completions for the prompts, or continued completions of the
    previous iteration."""
    samples: int | None = 0
    """Number of training samples from these prompts, or None if the samples of some iterations are deleted."""
    imitated: bool = False
    """Whether the warm-up trained on worked examples from the same problems."""
    gone: bool = False
    """Whether the run's prompts are deleted. In this case the result is based on the registry's list of trained
    problems."""

    def text(self) -> str:
        """Describe the iterations and the number of training samples of the run in one line for `rheostat lineage`."""
        if self.gone:
            return f"run {self.run} (from the registry's list, because the prompts of the run are deleted)"
        count = "samples deleted" if self.samples is None else f"{self.samples} samples"
        used_iterations = [f"{iterations_text(self.iterations)} ({count})"] if self.iterations else []
        warm_up = ["warm-up on the same problems"] if self.imitated else []
        return f"run {self.run}: {' and '.join([*warm_up, *used_iterations])}"


class PromptLearner(Settings):
    """Promoted policy whose training used at least one of the prompts that the user searched for."""

    registry: str
    """Name of the registry."""
    number: int
    """Number of the registry record that promoted the policy."""
    policy: str
    """Digest of the policy."""
    is_champion: bool
    """Whether the policy is the current champion."""
    learnt: tuple[PromptUsage, ...]
    """Reports for each run that used the prompts: the run of the policy, and runs of earlier champions that it
    started from."""

    def line(self) -> str:
        """Describe the policy and the runs that used the prompts in one line for the terminal."""
        where = "; ".join(each.text() for each in self.learnt)
        champion = ", champion" if self.is_champion else ""
        return (
            f"{self.registry}@{self.number}: policy {self.policy[:16]}{champion}, was trained on the prompts in {where}"
        )


def find_trained_policies(store: str, ids: frozenset[str]) -> list[PromptLearner]:
    """Search all registries of a store for promoted policies that were trained on any of these prompts, directly or
    through a champion they started from.

    Raises BadInput if a prompt_id is not 16 hexadecimal digits.
    """
    for name in ids:
        if not PROMPT_ID.fullmatch(name):
            raise BadInput(
                f"--prompt {name[:40]!r} must be a prompt_id, which has 16 digits (0-9 a-f). `rheostat rollouts "
                "--json` prints the prompt_ids."
            )
    return [learner for name in registries(store) for learner in _find_learners(store, open_registry(store, name), ids)]


def _find_learners(store: str, registry: Registry, ids: frozenset[str]) -> Iterator[PromptLearner]:
    champion, known = registry.champion(), dict[str, PromptUsage | None]()
    runs = list_runs(store)
    for record in registry.records():
        if record.kind != "promote":
            continue
        ancestors = list(ancestry(registry, record))
        for each in ancestors:
            if each.run not in known:
                run = open_run(store, each.run) if each.run in runs else None
                known[each.run] = _find_usage(registry, each.run, run, each.iteration, ids)
        usages = tuple(usage for each in ancestors if (usage := known[each.run]) is not None)
        if usages:
            yield PromptLearner(
                registry=registry.name,
                number=record.number,
                policy=record.policy,
                is_champion=champion is not None and champion.policy == record.policy,
                learnt=usages,
            )


def _find_usage(registry: Registry, name: str, run: Run | None, last: int, ids: frozenset[str]) -> PromptUsage | None:
    rows = None if run is None else find_prompt_rows(run, ids)
    if run is None or not rows:
        listed = ids & _own_prompts(registry, name)
        return PromptUsage(run=name, prompts=len(listed), gone=True) if listed else None
    return _describe_usage(run, rows, last)


def find_usage(run: Run, ids: frozenset[str]) -> PromptUsage | None:
    """Return how the completed iterations of a run used these prompts, or None if they did not. Raises BadInput if the
    run does not store its prompts."""
    rows = find_prompt_rows(run, ids)
    if rows is None:
        raise BadInput(
            f"run {run.name!r} stores no training prompts, because they were deleted or are not prepared yet, so it is "
            "unknown whether it used these prompts."
        )
    return _describe_usage(run, rows, len(sealed_iterations(run))) if rows else None


def _describe_usage(run: Run, rows: set[int], last: int) -> PromptUsage | None:
    warmup = run.record.config.get("warmup")
    imitated = run.has(SFT) and not (isinstance(warmup, dict) and warmup.get("chats"))
    iterations = [number for number in range(1, last + 1) if _uses_prompts(run, number, rows)]
    if not (imitated or iterations):
        return None
    samples = (
        None
        if iterations_without_rollouts(run, iterations)
        else sum(_count_samples(run, number, rows) for number in iterations)
    )
    return PromptUsage(
        run=run.name, prompts=len(rows), iterations=tuple(iterations), samples=samples, imitated=imitated
    )


def _own_prompts(registry: Registry, run: str) -> set[str]:
    """Return the prompt_ids that a run was trained on, from the list in the registry. Prompts that only earlier
    champions were trained on are excluded."""
    draft = read_draft(registry, run)
    keys = (trained_ids_key(run), draft.exclude_ids_key if draft is not None else "")
    own, before = ({*(registry.store.find(key) or b"").decode().split()} if key else set[str]() for key in keys)
    return own - before


def find_prompt_rows(run: Run, ids: frozenset[str]) -> set[int] | None:
    """Return the row numbers of the prompts in the run's training data, or None if the training data was deleted."""
    manifest = run.find(PROMPTS["train"])
    if manifest is None or WHOLE_RUN in deleted_parts(run):
        return None
    names = read_shard(run.store, manifest.shards[0], ["prompt_id"])["prompt_id"].to_pylist()
    return {row for row, name in enumerate(names) if name in ids}


def _uses_prompts(run: Run, number: int, rows: set[int]) -> bool:
    """Return whether an iteration generated completions for any of the prompts (given by row), or took over
    completions for them from the previous iteration."""
    if not run.has(StageKey.of(iteration_key(number), "seal")):
        return False
    iteration = Iteration(run, number)
    planned_rows = {row for batch in iteration.batches for row in batch.plan.rows}
    return not rows.isdisjoint(planned_rows | {*iteration.start_state.rows()})


def _count_samples(run: Run, number: int, rows: set[int]) -> int:
    """Return how many training samples of an iteration belong to the prompts, which are given by row."""
    tables = [read_shard(run.store, shard, ["prompt_row"]) for shard in Iteration(run, number).credit.shards]
    values = pa.array(sorted(rows), pa.int32())
    return sum(pc.sum(pc.is_in(table["prompt_row"], values)).as_py() or 0 for table in tables)
