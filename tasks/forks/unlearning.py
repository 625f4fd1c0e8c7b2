"""Unlearning of prompts: a fork of a run that begins before the prompts were first used, and never uses them.

The record of an unlearning lists what the new run shares with the old one, and the tombstones of the prompts if they
were also removed from the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rheostat.infra.config import Settings
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.store.registry import open_registry, registries
from rheostat.infra.store.runs import Run, list_runs, open_run
from rheostat.infra.store.tombstones import is_replacement
from rheostat.models.records.versions import policy_of
from rheostat.tasks.forgetting import remove_everywhere
from rheostat.tasks.forks.conflicts import PolicyNotStored, iterations_with_policy
from rheostat.tasks.forks.creation import ForkPlan, PlannedFork, request_fork
from rheostat.tasks.lineage.learners import (
    PromptLearner,
    PromptUsage,
    find_prompt_rows,
    find_trained_policies,
    find_usage,
)
from rheostat.tasks.lineage.versions import ancestry, champion_before
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import open_known_run

RECORD: Final = "unlearning/retrained"
"""Key of the journal entry that is written after the new run was trained."""
REMOVED: Final = "unlearning/removed"
"""Key of the journal entry that is written after the prompts were removed from the store."""


class UnlearningPlan(Settings):
    """What would be trained again so that a run has not learned from some prompts."""

    prompts: int
    """Number of the prompts that are in the run's training data."""
    usage: PromptUsage
    """How the run used them."""
    others: tuple[PromptUsage, ...]
    """How other runs of the store used them. These runs are not trained again."""
    policies: tuple[PromptLearner, ...]
    """Promoted policies that were trained on them."""
    fork: ForkPlan
    """The new run."""

    def lines(self) -> list[str]:
        """Describe the plan as lines for the terminal."""
        return [
            f"learned  {self.usage.text()}",
            *(f"also     {each.text()}" for each in self.others),
            *(f"policy   {each.line()}" for each in self.policies),
            *self.fork.lines(),
        ]


@dataclass(frozen=True, slots=True)
class PlannedUnlearning:
    """Unlearning whose settings have been checked."""

    plan: UnlearningPlan
    fork: PlannedFork


class Unlearned(Settings):
    """Result of an unlearning: a run that has not learned from some prompts, and what proves it."""

    run: str
    """Name of the new run."""
    parent: str
    """Name of the run that learned from the prompts."""
    prompt_ids: list[str]
    """Ids of the prompts."""
    after: int
    """Last shared iteration. The prompts were not used in it, nor before."""
    excluded_rows: list[int]
    """Row numbers of the prompts, which no plan of a later iteration contains."""
    policy: str
    """Digest of the new run's last policy."""
    reused: dict[str, str]
    """Digests of the shared results (manifests), by key. None of them depends on the prompts."""
    tombstones: dict[str, dict[str, str]] | None = None
    """Digests of the tombstones with which the prompts were removed, by run and key. None if they were not removed."""

    def text(self) -> str:
        """Describe the result as lines for the terminal."""
        removed = (
            "the prompts are still stored. Repeat the command with --forget to remove them"
            if self.tombstones is None
            else f"the prompts were removed from {', '.join(sorted(self.tombstones))}"
        )
        prompts = format_count(len(self.prompt_ids), "prompt")
        return "\n".join(
            [
                f"run      {self.run} has not learned from {prompts}, policy {self.policy[:16]}",
                f"reused   {format_count(len(self.reused), 'result')} of {self.parent}, up to iteration {self.after}",
                f"removed  {removed}",
            ]
        )


def request_unlearning(
    store: str, name: str, new_name: str, ids: frozenset[str], *, overrides: Sequence[str] = ()
) -> PlannedUnlearning:
    """Check whether a run can be trained again without some prompts, and return the plan. Nothing is written.

    The new run is a fork that begins at the last stored policy from before the first use. Raises BadInput if the run
    has not used the prompts, or if a fork is not enough, with the reason.
    """
    run = open_known_run(store, name)
    usage = find_usage(run, ids)
    rows = find_prompt_rows(run, ids)
    if usage is None or not rows:
        raise BadInput(f"run {name!r} was not trained on any of these prompts, so there is nothing to unlearn.")
    if usage.imitated:
        raise BadInput(
            f"run {name!r}: the warm-up trained on worked examples of the same problems, before the first iteration. "
            "Remove the problems from the data files, and start a new run."
        )
    if (earlier := _find_earlier(run, store, ids)) is not None:
        raise BadInput(
            f"run {name!r} began with a policy of run {earlier!r}, which was trained on these prompts, too. Unlearn "
            f"them in {earlier!r} first, and then train a new run from its policy."
        )
    fork = _request_fork(run, usage.iterations[0] - 1, store, new_name, sorted(rows), overrides)
    plan = UnlearningPlan(
        prompts=usage.prompts,
        usage=usage,
        others=tuple(_find_others(store, {name, new_name}, ids)),
        policies=tuple(find_trained_policies(store, ids)),
        fork=fork.plan,
    )
    return PlannedUnlearning(plan, fork)


def _request_fork(
    run: Run, last: int, store: str, new_name: str, rows: Sequence[int], overrides: Sequence[str]
) -> PlannedFork:
    """Return the planned fork at the newest iteration up to `last` whose policy is stored."""
    refusal: BadInput | None = None
    for number in iterations_with_policy(run, new_name, last):
        try:
            return request_fork(store, f"{run.name}@{number}", new_name, overrides=overrides, excluded_rows=rows)
        except PolicyNotStored as error:
            refusal = refusal or error
    raise refusal or BadInput(
        f"run {run.name!r} has no stored policy from before iteration {last + 1}, in which it first used the prompts. "
        "Remove the prompts from the data files, and start a new run."
    )


def _find_others(store: str, without: set[str], ids: frozenset[str]) -> list[PromptUsage]:
    usages = (find_usage(open_run(store, name), ids) for name in list_runs(store) if name not in without)
    return [usage for usage in usages if usage is not None]


def _find_earlier(run: Run, store: str, ids: frozenset[str]) -> str | None:
    """Return the name of a run that was trained on these prompts and with whose policy this run began, or None."""
    for name in registries(store):
        registry = open_registry(store, name)
        records = {each.number: each for each in registry.records()}
        champion = records.get(champion_before(registry, run.name))
        for record in () if champion is None else ancestry(registry, champion):
            for learner in find_trained_policies(store, ids):
                if learner.policy == record.policy:
                    return record.run
    first = policy_of(policy_after(run, 0)).digest
    return next((each.learnt[0].run for each in find_trained_policies(store, ids) if each.policy == first), None)


def record_retraining(run: Run, ids: frozenset[str]) -> Unlearned:
    """Write the record of an unlearning whose run, which must be locked, was trained, and return it."""
    fork = run.fork
    assert fork is not None, "an unlearning trains a fork"
    number, rows = len(sealed_iterations(run)), fork.excluded[-1].rows
    found = Unlearned(
        run=run.name,
        parent=fork.parent,
        prompt_ids=sorted(ids),
        after=fork.iteration,
        excluded_rows=list(rows),
        policy=policy_of(policy_after(run, number)).digest,
        reused={each.key: each.digest for each in run.manifests() if run.inherits(each.key)},
    )
    return Unlearned.model_validate(run.write_entry(RECORD, found.model_dump(mode="json", exclude={"tombstones"})))


def read_unlearned(store: str, name: str) -> Unlearned | None:
    """Return the record of an unlearning, or None if its run does not exist or is not trained yet."""
    if name not in list_runs(store):
        return None
    run = open_run(store, name)
    retrained, removed = run.find_entry(RECORD), run.find_entry(REMOVED)
    return None if retrained is None else Unlearned.model_validate({**retrained, **(removed or {})})


def remove_unlearned(store: str, unlearned: Unlearned) -> Unlearned:
    """Remove the prompts of an unlearning from all runs that share shards with the new run or its parent, and record
    the tombstones. If a call was interrupted, the next call finishes its work."""
    names = [unlearned.run, unlearned.parent]
    reports = remove_everywhere(store, names, frozenset(unlearned.prompt_ids), delete=True)
    tombstones = {each.run: _tombstones_of(open_run(store, each.run)) for each in reports}
    removed, run = unlearned.model_copy(update={"tombstones": tombstones}), open_run(store, unlearned.run)
    with run.lock():
        run.write_entry(REMOVED, removed.model_dump(mode="json", include={"tombstones"}))
    return removed


def _tombstones_of(run: Run) -> dict[str, str]:
    """Return the digests of the tombstones of shards that were replaced by shards without the prompts."""
    return {each.key: each.digest for each in run.manifests("retention/") if is_replacement(each)}
