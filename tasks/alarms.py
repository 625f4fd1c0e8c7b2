"""Alarms of an iteration and their consequences: a revert to an earlier policy, or the end of the run.

A revert depends only on committed manifests and on alarms that are part of the run's identity. It is committed before
anything else uses the new policy, so a run that is interrupted at any point makes the same decision again. Whether an
alarm ends the run is decided for its newest iteration, by the alarms in the current configuration.
"""

from collections.abc import Iterator

from rheostat.infra.counts import format_count
from rheostat.infra.errors import AlarmStopped
from rheostat.tasks.events import emit_of_run
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.ordered_reverts import required_revert, revert_target, triggered_alarms
from rheostat.tasks.run.reverts import has_reverted, policy_after, restored_version, revert_key
from rheostat.tasks.run.stages import commit_decision
from rheostat.tasks.views.metrics import sealed_iterations


def apply_alarms(open_run: OpenRun, number: int) -> bool:
    """Return to an earlier policy if an alarm requires it after this iteration. Return whether an alarm ends the run.

    Call this function after the update of the iteration and before any other result is computed from the new policy.
    """
    iteration = Iteration(open_run.run, number)
    revert = required_revert(iteration, open_run.settings.revert_alarms)
    if revert is not None:
        good_policy = policy_after(open_run.run, revert_target(open_run.run, number))
        critic = open_run.run.find(StageKey.critic(0)) if good_policy.key == StageKey.policy(0) else None
        commit_decision(
            open_run,
            revert_key(number),
            parents=[iteration.credit, iteration.update, good_policy, *([] if critic is None else [critic])],
            bundles={**good_policy.bundles, **({} if critic is None else critic.bundles)},
            detail=revert,
        )
    return number < open_run.settings.iterations and any(_stop_reasons(open_run, iteration))


def check_alarms(open_run: OpenRun) -> None:
    """Raise AlarmStopped if an alarm stops the run at its last completed iteration although more iterations are
    configured."""
    done, total, name = len(sealed_iterations(open_run.run)), open_run.settings.iterations, open_run.run.name
    ending = next(_stop_reasons(open_run, Iteration(open_run.run, done)), None) if 0 < done < total else None
    if ending is not None:
        text = f"after iteration {done} of {total}: {ending}"
        emit_of_run(name, "alarm.stopped", told=text)
        raise AlarmStopped(f"Run {name!r} was stopped by an alarm after iteration {done} of {total}: {ending}")


def describe_triggered(open_run: OpenRun, iteration: Iteration) -> dict[str, str]:
    """Return a message for each alarm that the iteration triggers, by alarm name. Messages state the consequence."""
    raised_now = list(triggered_alarms(open_run.settings.alarms, iteration))
    consequences = {alarm.label: "; the run stops" for alarm, _ in raised_now if alarm.action == "stop"}
    if has_reverted(open_run.run, iteration.number):
        revert = open_run.run.require(revert_key(iteration.number))
        consequences[str(revert.detail["alarm"])] = f"; the run reverts to policy {restored_version(revert)}"
    lines = {alarm.label: f"alarm {alarm.label!r}: {sentence}" for alarm, sentence in raised_now}
    return {name: f"{line}{consequences.get(name, '')}" for name, line in lines.items()}


def _stop_reasons(open_run: OpenRun, iteration: Iteration) -> Iterator[str]:
    """Yield one message for each alarm that ends the run after this iteration."""
    for alarm, sentence in triggered_alarms(
        [each for each in open_run.settings.alarms if each.action == "stop"], iteration
    ):
        yield (
            f"alarm {alarm.label!r}: {sentence}. To continue, change the bound of the alarm or remove it, then run "
            "the same command again."
        )
    if not has_reverted(open_run.run, iteration.number):
        return
    revert_alarms = [
        open_run.run.require(revert_key(number)).detail["alarm"]
        for number in range(1, iteration.number + 1)
        if has_reverted(open_run.run, number)
    ]
    for alarm in open_run.settings.revert_alarms:
        name, times = alarm.label, revert_alarms.count(alarm.label)
        if name == revert_alarms[-1] and times > alarm.max_reverts:
            yield (
                f"alarm {name!r} reverted the run to an earlier policy {format_count(times, 'time')}, more than its "
                f"max_reverts allows. To continue, set max_reverts of the alarm to {times}, then run the same command "
                "again."
            )
