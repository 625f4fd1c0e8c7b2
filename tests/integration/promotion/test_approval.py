"""The approval form of a deployed retrain, on a real server. The tests act as the worker."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Event as Flag
from threading import Thread

import pytest
from prefect.events import Event, emit_event
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter

from rheostat.flows.cli.app import main
from tests.support.asking import OVERRIDES, PROPOSING, RUN, Asking, asked
from tests.support.faults import planted
from tests.support.in_process import prefect_at
from tests.support.jobs import TINY, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

YES, NO = {"approve": "yes", "reason": "read fifty", "name": "Ann"}, {"approve": "no"}


@pytest.fixture(scope="module")
def proposed(tmp_path_factory, prefect_api):
    """Retrain that waits for its form."""
    asking = asked(tmp_path_factory.mktemp("asks"), prefect_api)
    shutil.copytree(asking.job.store, asking.job.home / "proposed")
    return asking


@pytest.fixture
def restored(proposed):
    """Waiting retrain whose store is restored before each test."""
    shutil.rmtree(proposed.job.store)
    shutil.copytree(proposed.job.home / "proposed", proposed.job.store)
    return proposed


@pytest.fixture
def asking(restored):
    """Waiting retrain with a flow run that waits."""
    return restored if restored.state_name() == "Suspended" else restored.another()


@pytest.fixture
def events_seen(prefect_api):
    """Events of our registries and budgets that a subscriber receives during the test."""
    events, listens, ends = list[Event](), Flag(), list[Callable[[], object]]()
    probe = {"event": "rheostat.registry.probe", "resource": {"prefect.resource.id": "rheostat.tests"}}

    async def listen():
        ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, asyncio.current_task().cancel))
        ours = EventFilter(event=EventNameFilter(prefix=["rheostat.registry.", "rheostat.budget."]))
        async with get_events_subscriber(filter=ours) as subscriber:
            async for event in subscriber:
                listens.set() if event.event == probe["event"] else events.append(event)

    with prefect_at(prefect_api):
        listener = Thread(target=copy_context().run, args=(cancellable, listen()), daemon=True)
        listener.start()
        while not listens.wait(1):
            emit_event(**probe)  # the server sends no event that is older than the subscription
    yield events
    ends[0]()
    listener.join()


def cancellable(work: Coroutine[object, object, None]) -> None:
    with suppress(asyncio.CancelledError):
        asyncio.run(work)


def kinds(asking: Asking) -> list[str]:
    return [record.kind for record in asking.registry.records()]


def test_an_approved_proposal_becomes_champion_without_further_work(asking, events_seen):
    schema, said = asking.form()
    assert schema["required"] == ["approve", "reason"] and schema["properties"]["approve"]["enum"] == ["yes", "no"]
    assert said.startswith(f"Should the policy of {RUN} become the champion of **assistant**?") and "- sums: " in said
    proposal = asking.registry.records()[0]
    assert f"challenger: `{proposal.policy[:16]}` of run {RUN}, record 1" in said
    shutil.rmtree(asking.job.home / "results")  # as where another machine's worker goes on
    (asking.job.home / "faults.json").write_text("[]")
    with planted(asking.job.home):
        assert asking.resumed(YES).state.name == "Completed"
    assert not asking.job.works()
    assert kinds(asking) == ["proposal", "promote"]
    champion = asking.registry.champion()
    assert (champion.policy, champion.gate, champion.reason) == (proposal.policy, proposal.gate, "read fifty")
    assert champion.who == "Ann, by the form of tiny-20261102"
    assert wait_for(lambda: events_seen)
    (event,) = events_seen
    assert (event.event, event.resource.id) == ("rheostat.registry.promote", "rheostat.registry.assistant")
    told = {name: event.payload[name] for name in ("number", "policy", "run", "who")}
    assert told == {"number": 2, "policy": proposal.policy, "run": RUN, "who": "Ann, by the form of tiny-20261102"}
    flow_run = f"prefect.flow-run.{asking.flow_run.id}"
    assert flow_run in [related.id for related in event.related], "the feed of the flow run has it"
    page = asking.page()
    assert page.startswith(f"# Registry assistant, record 2: promote\n\nRun `{RUN}`")
    assert "compared with the run's initial policy" in page and "read fifty" in page
    assert "| sums > -1 | " in page and "| 40 | 0 | 0 | 0.0% |" in page


def test_a_refused_proposal_stays_refused(asking, capsys):
    ended = asking.resumed(NO | {"reason": "it is rude"})
    assert (ended.state.name, kinds(asking)) == ("Completed", ["proposal", "refuse"])
    assert asking.registry.champion() is None
    assert main(["promote", "assistant", RUN, "--reason", "still", "--store", str(asking.job.store)]) == 2
    assert f"the proposal of run '{RUN}' was refused (record 2)" in capsys.readouterr().err


def test_an_answer_after_a_promotion_at_a_terminal_changes_nothing(asking, caplog, events_seen):
    with asking.job.prefect():
        assert main(["promote", "assistant", RUN, "--reason", "at a terminal", "--store", str(asking.job.store)]) == 0
    assert wait_for(lambda: events_seen)
    assert [(event.event, event.payload["reason"]) for event in events_seen] == [
        ("rheostat.registry.promote", "at a terminal")
    ]
    assert asking.resumed(YES).state.name == "Completed"
    assert "registry assistant, record 2: nothing changed" in caplog.text
    assert kinds(asking) == ["proposal", "promote"]
    assert len(events_seen) == 1, "what is so already is no news"


def test_an_answer_after_a_change_of_champion_is_refused_in_one_line(asking):
    learnt = asking.job.store / "registry/assistant/learnt"

    def other(number, _):
        proposal = asking.registry.records()[0]
        shutil.copy(learnt / f"{RUN}.txt", learnt / "other.txt")
        return proposal.model_copy(update={"number": number, "kind": "promote", "policy": "f" * 64, "run": "other"})

    asking.registry.append(other)
    ended = asking.resumed(YES).state
    assert ended.name == "Failed"
    assert f"run '{RUN}' with record 0, but record 2 is the champion now" in ended.message
    assert kinds(asking) == ["proposal", "promote"]


def test_a_retrain_at_a_terminal_prints_the_command_that_signs_the_proposal(restored, capsys):
    job = restored.job
    (job.home / "tiny.toml").write_text(TINY + PROPOSING)
    here = ["--store", str(job.store), "--day", "2026-11-02", "pools.cluster=threads", *OVERRIDES]
    with job.prefect():
        assert main(["retrain", str(job.home / "tiny.toml"), *here]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "record   1: proposal",
        f"sign     rheostat promote assistant {RUN} --reason TEXT --store {job.store}",
    ]
    assert kinds(restored) == ["proposal"]
