"""Reference model of each iteration, from which a KL penalty measures the divergence of the policy: the initial policy,
the policy of the last reset, or a moving average of the policies, which can also be a teacher. It depends only on
stored results, so a resumed run uses the same one."""

from collections.abc import Mapping
from math import inf
from typing import Final, get_args

from pydantic import JsonValue

from rheostat.infra.config import read_recorded
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.models.config.alarms import ROUNDING
from rheostat.models.config.divergence import KlPenalty, ReferenceRule
from rheostat.models.config.teachers import TeacherPolicy
from rheostat.models.records.versions import AVERAGE, ModelVersion, policy_of
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.run.reverts import has_reverted, policy_after, updating_iteration

ESTIMATORS: Final = get_args(KlPenalty.model_fields["kind"].annotation)
"""Values of `kind` with which recorded settings are those of a KL penalty."""
TEACHER: Final = TeacherPolicy.model_fields["kind"].default
"""Value of `kind` with which recorded settings are those of a teacher that may be a moving average."""


def recorded_rule(run: Run, number: int) -> ReferenceRule:
    """Return the recorded rule by which the reference of an iteration is reset or averaged."""
    config = run.config_at(number)
    found = (_find_rule(config.get(table)) for table in ("update", "algorithm"))
    return next((rule for rule in found if rule is not None), ReferenceRule())


def _find_rule(settings: JsonValue) -> ReferenceRule | None:
    """Return the rule of the first KL penalty with a changing reference, or teacher that is an average, in recorded
    settings. All tables are searched, because an algorithm of the user may have its KL penalty at any key."""
    children = settings if isinstance(settings, list) else []
    if isinstance(settings, Mapping):
        rule = {key: settings[key] for key in ReferenceRule.model_fields if settings.get(key) is not None}
        is_teacher = settings.get("kind") == TEACHER and "template" in settings
        if rule and (is_teacher or settings.get("kind") in ESTIMATORS):
            return read_recorded(ReferenceRule, rule)
        children = [*settings.values()]
    found = map(_find_rule, children)
    return next((inner for inner in found if inner is not None), None)


def reference_iteration(run: Run, number: int, rule: ReferenceRule) -> int:
    """Return the iteration whose policy or moving average is the reference of iteration `number`, or 0 for the initial
    policy.

    With n = `reset_every`, this is n x floor((number - 1) / n) (reference reset, ProRL, arXiv 2505.24864). If an alarm
    has reverted to a policy that is older than this reference, the restored policy is the reference until the next
    reset, because the alarm rejected the policies after it.

    A moving average is stored with the policy after each iteration. If none is stored, the average begins with the
    initial policy: in iteration 1, and if a fork is the first that sets `ema_decay`.
    """
    if rule.ema_decay:
        return number - 1 if AVERAGE in policy_after(run, number - 1).bundles else 0
    if rule.reset_every:
        reference = (number - 1) // rule.reset_every * rule.reset_every
    elif rule.reset_after_plateau:
        reference = _last_plateau(run, number - 1, rule.reset_after_plateau)
    else:
        return 0
    if not run.config_at(number).get("alarms"):  # only alarms that revert are recorded
        return reference
    for later in range(reference + 1, number):
        if has_reverted(run, later) and updating_iteration(run, later) < updating_iteration(run, reference):
            reference = later
    return reference


def _last_plateau(run: Run, last: int, length: int) -> int:
    """Return the last iteration up to `last` that ended a plateau, or 0 if there is none. A plateau is `length`
    iterations without a new best mean reward since the start of the run. Counting restarts after a reset and after each
    new best. Reverted iterations do not count."""
    best, counted, reset = -inf, 0, 0
    for number in range(1, last + 1):
        if has_reverted(run, number):
            continue
        reward = run.require(StageKey.of(iteration_key(number), "credit")).metrics.get("reward_mean", -inf)
        counted += 1
        if best == -inf or reward > best + ROUNDING * abs(best):
            best, counted = reward, 0
        elif counted == length:
            reset, counted = number, 0
    return reset


def reference_of(run: Run, number: int) -> Manifest:
    """Return the stored record that names the reference model of an iteration."""
    return policy_after(run, reference_iteration(run, number, recorded_rule(run, number)))


def select_reference(record: Manifest, rule: ReferenceRule) -> ModelVersion:
    """Return the reference model that a record names: its moving average with `ema_decay`, otherwise its policy. The
    record of the initial policy names no moving average."""
    policy, average = policy_of(record), record.bundles.get(AVERAGE)
    return policy if average is None or rule.ema_decay is None else ModelVersion(policy.version, weights=average)
