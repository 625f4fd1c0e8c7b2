"""Alarms of an iteration and their consequences: a revert to an earlier policy, or the end of the run.

A revert depends only on committed manifests and on alarms that are part of the run's identity. It is committed before
anything else uses the new policy, so a run that is interrupted at any point makes the same decision again. Whether an
alarm ends the run is decided for its newest iteration, by the alarms in the current configuration.
"""

from collections.abc import Iterator

from infra.errors import AlarmStopped
from tasks.events import emit_of_run
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey
from tasks.run.ordered_returns import ordered_return, raised, version_to_return_to
from tasks.run.returns import has_returned, policy_after, return_key, returned_to
from tasks.run.session import Session
from tasks.run.stages import record
from tasks.views.metrics import sealed_iterations


def heed_alarms(session: Session, number: int) -> bool:
    """Commit the revert that an alarm requires after an iteration. Return whether an alarm ends the run there.

    Must be called after the update of the iteration, before any other result is derived from it.
    """
    iteration = Iteration(session.run, number)
    ordered = ordered_return(iteration, session.settings.returns)
    if ordered is not None:
        good = policy_after(session.run, version_to_return_to(session.run, number))
        critic = session.run.find(StageKey.critic(0)) if good.key == StageKey.policy(0) else None
        record(
            session,
            return_key(number),
            parents=[iteration.credit, iteration.update, good, *([] if critic is None else [critic])],
            bundles={**good.bundles, **({} if critic is None else critic.bundles)},
            detail=ordered,
        )
    return number < session.settings.iterations and any(_endings(session, iteration))


def check_alarms(session: Session) -> None:
    """Raise AlarmStopped if an alarm ends the run after its last sealed iteration and iterations remain."""
    done, total, name = len(sealed_iterations(session.run)), session.settings.iterations, session.run.name
    ending = next(_endings(session, Iteration(session.run, done)), None) if 0 < done < total else None
    if ending is not None:
        told = f"after iteration {done} of {total}, {ending}"
        emit_of_run(name, "alarm.stopped", told=told)
        raise AlarmStopped(f"run {name!r}: {told}")


def raised_alarms(session: Session, iteration: Iteration) -> dict[str, str]:
    """Return a message for each alarm that an iteration triggers, by the name of the alarm, with the consequence."""
    found = list(raised(session.settings.alarms, iteration))
    follows = {alarm.known_as: "; the run ends" for alarm, _ in found if alarm.action == "stop"}
    if has_returned(session.run, iteration.number):
        returned = session.run.require(return_key(iteration.number))
        follows[str(returned.detail["alarm"])] = f"; the run returns to policy {returned_to(returned)}"
    told = {alarm.known_as: f"alarm {alarm.known_as!r}: {said}" for alarm, said in found}
    return {name: f"{line}{follows.get(name, '')}" for name, line in told.items()}


def _endings(session: Session, iteration: Iteration) -> Iterator[str]:
    """Yield the reasons why alarms end the run after an iteration."""
    for alarm, said in raised([each for each in session.settings.alarms if each.action == "stop"], iteration):
        yield f"alarm {alarm.known_as!r}: {said}; the same command with another bound, or without the alarm, goes on"
    if not has_returned(session.run, iteration.number):
        return
    orders = [
        session.run.require(return_key(number)).detail["alarm"]
        for number in range(1, iteration.number + 1)
        if has_returned(session.run, number)
    ]
    for alarm in session.settings.returns:
        name, times = alarm.known_as, orders.count(alarm.known_as)
        if name == orders[-1] and times > alarm.returns:
            yield f"alarm {name!r} had it return {times} times; the same command with `returns` {times} goes on"
