"""Unlearning of prompts: a fork of a run that begins before the prompts were first used, and never uses them.

The record of an unlearning lists what the new run shares with the old one, and the tombstones of the prompts if they
were also removed from the store.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rheostat.infra.config import Settings, describe_difference
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.store.dependencies import dependency_records, recorded_config
from rheostat.infra.store.forks import Fork
from rheostat.infra.store.garbage import readable_runs
from rheostat.infra.store.registry import open_registry, registries
from rheostat.infra.store.runs import Run, list_runs, open_run
from rheostat.infra.store.tombstones import is_replacement
from rheostat.models.data.curriculum import max_prompts, read_parts
from rheostat.models.records.versions import policy_of
from rheostat.tasks.config.run import RunConfig, override_config
from rheostat.tasks.forgetting import remove_everywhere
from rheostat.tasks.forks.conflicts import IterationNotForkable, iterations_with_policy
from rheostat.tasks.forks.creation import ForkPlan, PlannedFork, read_recorded_config, request_fork
from rheostat.tasks.lineage.learners import (
    PROMPT_ID,
    PromptLearner,
    PromptUsage,
    find_prompt_rows,
    find_trained_policies,
    find_usage,
)
from rheostat.tasks.lineage.versions import ancestry, champion_before
from rheostat.tasks.preparation import find_dialogue_with_stored_user
from rheostat.tasks.run.keys import PROMPTS, StageKey
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import open_known_run

RECORD: Final = "unlearning/retrained"
"""Key of the journal entry that is written after the new run was trained."""
REMOVED: Final = "unlearning/removed"
"""Key of the journal entry that is written after the prompts were removed from the store."""


class UnlearningPlan(Settings):
    """Plan to train a run again so that it has not learned from some prompts."""

    given: int
    """Number of prompts to unlearn."""
    prompts: int
    """Number of them that are in the run's training data."""
    usage: PromptUsage
    """Use of the prompts by the run."""
    others: tuple[PromptUsage, ...]
    """Use of the prompts by other runs of the store, which are not trained again."""
    unknown: tuple[str, ...]
    """Names of runs that store no training prompts, so that their use of the prompts is unknown."""
    policies: tuple[PromptLearner, ...]
    """Promoted policies that were trained on them."""
    fork: ForkPlan
    """The new run."""

    def lines(self) -> list[str]:
        """Describe the plan as lines for the terminal."""
        return [
            f"prompts  {self.prompts:,} of {format_count(self.given, 'prompt')} found",
            f"learned  {self.usage.text()}",
            *(f"also     {each.text()}" for each in self.others),
            *(f"unknown  run {name} (it stores no training prompts)" for name in self.unknown),
            *(f"policy   {each.line()}" for each in self.policies),
            *self.fork.lines(),
        ]


@dataclass(frozen=True, slots=True)
class PlannedUnlearning:
    """Unlearning whose settings have been checked."""

    plan: UnlearningPlan
    fork: PlannedFork


class Unlearned(Settings):
    """Record of an unlearning: the new run, the excluded prompts, the shared results, and the tombstones of removed
    data."""

    run: str
    """Name of the new run."""
    parent: str
    """Name of the run that learned from the prompts."""
    prompt_ids: list[str]
    """Ids of the prompts that were given. Some may not be in the run's training data."""
    after: int
    """Last shared iteration. The prompts were not used in it, nor before."""
    excluded_rows: list[int]
    """Row numbers of the prompts, which no plan of a later iteration contains."""
    policy: str
    """Digest of the new run's last policy."""
    reused: dict[str, str]
    """Digests of the shared results (manifests), by key. No shared update used the prompts. Results after iteration
    `after` are rollouts and scores of shards without the prompts."""
    tombstones: dict[str, dict[str, str]] | None = None
    """Digests of the tombstones with which the prompts were removed, by run and key. None if they were not removed."""

    def text(self) -> str:
        """Describe the result as lines for the terminal."""
        removed = (
            "the prompts are still stored. Repeat the command with --forget to remove them"
            if self.tombstones is None
            else f"the prompts were removed from {', '.join(sorted(self.tombstones))}"
        )
        later = sum(key.startswith("it-") and StageKey.parse(key).iteration > self.after for key in self.reused)
        also = f", and {format_count(later, 'result')} of later iterations without the prompts" if later else ""
        reused = f"{format_count(len(self.reused) - later, 'result')} of {self.parent}, up to iteration {self.after}"
        prompts = format_count(len(self.prompt_ids), "prompt")
        return "\n".join(
            [
                f"run      {self.run} has not learned from {prompts}, policy {self.policy[:16]}",
                f"reused   {reused}{also}",
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
        raise BadInput(f"No completed iteration of run {name!r} used these prompts, so there is nothing to unlearn.")
    _check_models(run, store, usage, ids)
    fork = _request_fork(run, usage.iterations[0] - 1, store, new_name, sorted(rows), overrides)
    check_remaining_prompts(run, rows, fork.config)
    others, unknown = _find_others(store, {name, new_name}, ids)
    plan = UnlearningPlan(
        given=len(ids),
        prompts=usage.prompts,
        usage=usage,
        others=tuple(others),
        unknown=tuple(unknown),
        policies=tuple(find_trained_policies(store, ids)),
        fork=fork.plan,
    )
    return PlannedUnlearning(plan, fork)


def _check_models(run: Run, store: str, usage: PromptUsage, ids: frozenset[str]) -> None:
    """Raise BadInput if models with which a run began were trained on the prompts, so that a fork would not unlearn
    them."""
    name, config = run.name, read_recorded_config(run, store)
    dialogue = find_dialogue_with_stored_user(config)
    trained = {
        "the warm-up": usage.imitated,
        "the training on preference pairs": getattr(config.preferences, "kind", "") == "answers",
        "the training of the simulated user": dialogue is not None and dialogue.model.training is not None,
        **{
            f"the training of the model of {term}": reward.model.training is not None
            for term, reward in config.scoring.model_rewards.items()
        },
    }
    for what in (what for what, is_trained in trained.items() if is_trained):
        raise BadInput(
            f"run {name!r}: {what} may have used examples of the same problems, before the first iteration. Remove the "
            "problems from the data files, and start a new run."
        )
    if (earlier := _find_earlier(run, store, ids)) is not None:
        raise BadInput(
            f"run {name!r} began with a policy of run {earlier!r}, which was trained on these prompts, too. Unlearn "
            f"them in {earlier!r} first, and then train a new run from its policy."
        )


def check_remaining_prompts(run: Run, rows: Collection[int], config: RunConfig) -> None:
    """Raise BadInput if too few prompts remain for an iteration."""
    prompts = run.require(PROMPTS["train"])
    parts = [part for part in read_parts(prompts.detail) if part.rows]
    counts = [sum(row not in rows for row in part.rows) for part in parts] or [prompts.shards[0].rows - len(rows)]
    most, _ = max_prompts(counts, [part.weight for part in parts] or [1.0])
    if most < config.rollout.prompts:
        raise BadInput(
            f"rollout.prompts is {config.rollout.prompts}, but without these prompts the training data of run "
            f"{run.name!r} allows only {most}. Set rollout.prompts to {most} or less."
        )


def _request_fork(
    run: Run, last: int, store: str, new_name: str, rows: Sequence[int], overrides: Sequence[str]
) -> PlannedFork:
    """Return the planned fork at the newest iteration up to `last` that can be forked, or the existing fork."""
    existing = open_run(store, new_name).fork if new_name in list_runs(store) else None
    refusal: BadInput | None = None
    candidates = iterations_with_policy(run, new_name, last)
    if existing is not None and existing.parent == run.name and _own_exclusion(existing, run) == tuple(rows):
        candidates = iter([existing.iteration])
    for number in candidates:
        try:
            return request_fork(store, f"{run.name}@{number}", new_name, overrides=overrides, excluded_rows=rows)
        except IterationNotForkable as error:
            refusal = refusal or error
    raise refusal or BadInput(
        f"run {run.name!r} has no stored policy from before iteration {last + 1}, in which it first used the prompts. "
        "Remove the prompts from the data files, and start a new run."
    )


def _own_exclusion(fork: Fork, parent: Run) -> tuple[int, ...]:
    """Return the rows that a fork excludes in addition to those that its parent excludes."""
    count = 0 if parent.fork is None else len(parent.fork.excluded)
    return fork.excluded[count].rows if len(fork.excluded) > count else ()


def _find_others(store: str, without: set[str], ids: frozenset[str]) -> tuple[list[PromptUsage], list[str]]:
    """Return the use of the prompts by other runs of the store, and the names of runs whose use is unknown."""
    usages, unknown = list[PromptUsage](), list[str]()
    for run in readable_runs(store):
        if run.name in without:
            continue
        if find_prompt_rows(run, ids) is None:
            unknown.append(run.name)
        elif (usage := find_usage(run, ids)) is not None:
            usages.append(usage)
    return usages, unknown


def _find_earlier(run: Run, store: str, ids: frozenset[str]) -> str | None:
    """Return the name of a run that was trained on these prompts and with whose policy this run began, or None."""
    learners = {each.policy: each for each in find_trained_policies(store, ids)}
    related = {run.name} | ({run.fork.parent, *run.fork.shared} if run.fork is not None else set())
    for name in registries(store):
        registry = open_registry(store, name)
        records = {each.number: each for each in registry.records()}
        for champion in (records.get(champion_before(registry, each)) for each in sorted(related)):
            for record in () if champion is None else ancestry(registry, champion):
                if record.policy in learners:
                    return record.run
    if (learner := learners.get(policy_of(policy_after(run, 0)).digest)) is not None:
        return learner.learnt[0].run
    start = _find_start(run)
    for other in readable_runs(store):
        is_start = other.name not in related and start.startswith(f"{other.store.uri}/")
        if is_start and find_prompt_rows(other, ids) and find_usage(other, ids) is not None:
            return other.name
    return None


def _find_start(run: Run) -> str:
    """Return the address of the model directory with which a run began, or an empty string if there is none."""
    policy, records = run.record.config.get("policy"), dependency_records(run)
    path = str(policy.get("path") or "") if isinstance(policy, dict) else ""
    if not path or "://" in path:
        return path
    return Path(records[-1].folder if records else "", path).resolve().as_uri()


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


def read_unlearned(
    store: str, name: str, *, parent: str, ids: frozenset[str], overrides: Sequence[str] = ()
) -> Unlearned | None:
    """Return the record of an unlearning, or None if its run does not exist or is not trained yet. Raises BadInput if
    the record is about another run or other prompts, or if the run has other settings than the overrides."""
    for each in ids:
        if not PROMPT_ID.fullmatch(each):
            raise BadInput(f"a prompt_id has 16 digits (0-9 a-f), found {each[:40]!r}")
    if not ids:
        raise BadInput("there is no prompt_id. Name at least one prompt to unlearn.")
    run = open_run(store, name) if name in list_runs(store) else None
    retrained = None if run is None else run.find_entry(RECORD)
    if run is None or retrained is None:
        return None
    unlearned = Unlearned.model_validate({**retrained, **(run.find_entry(REMOVED) or {})})
    if (unlearned.parent, unlearned.prompt_ids) != (parent, sorted(ids)):
        raise BadInput(
            f"run {name!r} already exists, and it unlearned other prompts or another run. Choose another name."
        )
    document = {**recorded_config(run), "name": name, "store": store, "iterations": len(sealed_iterations(run))}
    config = override_config(document, overrides, source=f"run {name}", recorded=True)
    changes = describe_difference(*run.settings_beside(config))
    if changes or config.iterations != len(sealed_iterations(run)):
        reason = changes or f"iterations was {len(sealed_iterations(run))}, is {config.iterations}"
        raise BadInput(f"run {name!r} is already trained with other settings: {reason}. Choose another name.")
    return unlearned


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
