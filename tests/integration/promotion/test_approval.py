"""The form with which a deployment's retrain asks for approval, on a real server; a worker's part is done here."""

import asyncio
import json
import shutil
import tomllib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from threading import Event as Flag
from threading import Thread
from uuid import UUID

import httpx
import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events import Event
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow as run_flow_of
from prefect.states import Pending

from flows.cli.app import main
from flows.cli.train import run_flow
from infra.store.registry import open_registry
from tasks.config.run import override_config
from tests.support.faults import planted
from tests.support.in_process import InProcessJob, prefect_at
from tests.support.jobs import PASSWORD, SMALLEST, TINY, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROPOSING = """
evaluations = [{name = "sums", data = {kind = "arithmetic", heldout_problems = 40}, problems = 40}]
[promotion]
registry = "assistant"
primary = {suite = "sums", min_gain = -1}
approve = "manual"
"""
"""Rules by which a policy that learns nothing becomes a proposal."""
OVERRIDES = (*SMALLEST, "iterations=1")

RUN, YES, NO = "tiny-20261102", {"approve": "yes", "reason": "read fifty", "name": "Ann"}, {"approve": "no"}


@dataclass(frozen=True)
class Asking:
    """The tiny job, retrained by a flow that a deployment would run."""

    job: InProcessJob
    deployment: UUID
    flow_run: FlowRun

    @property
    def registry(self):
        return open_registry(str(self.job.store), "assistant")

    def goes_on(self) -> FlowRun:
        """Do what a worker does with a scheduled flow run; return what the server says of it then."""
        from flows.retrain import retrain

        async def work():
            async with get_client() as client:
                await client.set_flow_run_state(self.flow_run.id, Pending())
                scheduled = await client.read_flow_run(self.flow_run.id)
            with suppress(Pause):
                await run_flow_of(retrain, flow_run=scheduled, return_type="state")
            return await self.read()

        with self.job.prefect():
            return run_flow(work())

    async def read(self) -> FlowRun:
        async with get_client() as client:
            return await client.read_flow_run(self.flow_run.id)

    def state_name(self) -> str:
        with self.job.prefect():
            return run_flow(self.read()).state.name

    def resumed(self, answer: dict[str, str]) -> FlowRun:
        """Answer the form as the UI does, and go on."""

        async def answered():
            async with get_client() as client:
                return await client.resume_flow_run(self.flow_run.id, run_input=answer)

        with self.job.prefect():
            said = run_flow(answered())
        assert said.status == "ACCEPT", said
        return self.goes_on()

    def form(self) -> tuple[dict[str, object], str]:
        """Schema and description of the form."""

        async def read():
            async with get_client() as client:
                run = await client.read_flow_run(self.flow_run.id)
                keys = run.state.state_details.run_input_keyset
                schema, described = [
                    await client.read_flow_run_input(run.id, keys[part]) for part in ("schema", "description")
                ]
            return json.loads(schema), json.loads(described)

        with self.job.prefect():
            return run_flow(read())

    def page(self) -> str:
        """What the artifact of the gate shows."""
        wanted = {"artifacts": {"flow_run_id": {"any_": [str(self.flow_run.id)]}, "key": {"any_": [f"{RUN}-gate"]}}}
        asked = {**wanted, "sort": "CREATED_DESC"}
        found = httpx.post(f"{self.job.api}/artifacts/filter", json=asked, auth=PASSWORD, timeout=30)
        return max(found.raise_for_status().json(), key=lambda artifact: artifact["created"])["data"]

    def another(self) -> "Asking":
        """The same day's retrain, triggered again; as far as its own form."""
        asking = replace(self, flow_run=triggered(self.job, self.deployment))
        assert asking.goes_on().state.name == "Suspended"
        return asking


def triggered(job: InProcessJob, deployment: UUID) -> FlowRun:
    """A run of the deployment that nobody has started."""
    here = (f"store={job.store}", "pools.cluster=threads", *OVERRIDES)
    config = override_config(tomllib.loads(TINY) | tomllib.loads(PROPOSING), here, source="tiny")
    parameters = {"config": config.model_dump(mode="json"), "day": "2026-11-02"}

    async def create():
        async with get_client() as client:
            return await client.create_flow_run_from_deployment(deployment, parameters=parameters)

    with job.prefect():
        return run_flow(create())


async def deploy() -> UUID:
    from flows.retrain import retrain

    async with get_client() as client:
        return await client.create_deployment(await client.create_flow(retrain), name="asks", entrypoint="none")


@pytest.fixture(scope="module")
def proposed(tmp_path_factory, prefect_api):
    """A retrain that waits for its form."""
    job = InProcessJob(tmp_path_factory.mktemp("asks"), prefect_api, sends_events=True)
    with job.prefect():
        deployment = run_flow(deploy())
    asking = Asking(job, deployment, triggered(job, deployment))
    assert asking.goes_on().state.name == "Suspended"
    shutil.copytree(job.store, job.home / "proposed")
    return asking


@pytest.fixture
def restored(proposed):
    """The same, with a store as it was when it began to wait."""
    shutil.rmtree(proposed.job.store)
    shutil.copytree(proposed.job.home / "proposed", proposed.job.store)
    return proposed


@pytest.fixture
def asking(restored):
    """The same, with a flow run that waits."""
    return restored if restored.state_name() == "Suspended" else restored.another()


@pytest.fixture
def heard(prefect_api):
    """What the server tells of our registries and budgets from now on, as who listens hears it."""
    events, listens, ends = list[Event](), Flag(), list[Callable[[], object]]()

    async def listen():
        ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, asyncio.current_task().cancel))
        ours = EventFilter(event=EventNameFilter(prefix=["rheostat."]))
        async with get_events_subscriber(filter=ours) as subscriber:
            listens.set()
            async for event in subscriber:
                events.append(event)

    with prefect_at(prefect_api):
        listener = Thread(target=copy_context().run, args=(cancellable, listen()), daemon=True)
        listener.start()
    assert listens.wait(60)
    yield events
    ends[0]()
    listener.join()


def cancellable(work: Coroutine[object, object, None]) -> None:
    with suppress(asyncio.CancelledError):
        asyncio.run(work)


def kinds(asking: Asking) -> list[str]:
    return [record.kind for record in asking.registry.records()]


def test_an_approved_proposal_is_champion_and_no_worker_works_again(asking, heard):
    schema, said = asking.form()
    assert schema["required"] == ["approve", "reason"] and schema["properties"]["approve"]["enum"] == ["yes", "no"]
    assert said.startswith(f"Is the policy of {RUN} the next champion of **assistant**?") and "- sums: " in said
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
    assert champion.who == "Ann, by the form of tiny"
    assert wait_for(lambda: heard, seconds=60)
    (event,) = heard
    assert (event.event, event.resource.id) == ("rheostat.registry.promote", "rheostat.registry.assistant")
    told = {name: event.payload[name] for name in ("number", "policy", "run", "who")}
    assert told == {"number": 2, "policy": proposal.policy, "run": RUN, "who": "Ann, by the form of tiny"}
    flow_run = f"prefect.flow-run.{asking.flow_run.id}"
    assert flow_run in [related.id for related in event.related], "the feed of the flow run has it"
    page = asking.page()
    assert page.startswith(f"# Registry assistant, record 2: promote\n\nRun `{RUN}`")
    assert "compared with the run's first policy" in page and "read fifty" in page
    assert "| sums > -1 | " in page and "| 40 | 0 | 0 | 0.0% |" in page


def test_a_refused_proposal_stays_refused(asking, capsys):
    ended = asking.resumed(NO | {"reason": "it is rude"})
    assert (ended.state.name, kinds(asking)) == ("Completed", ["proposal", "refuse"])
    assert asking.registry.champion() is None
    assert main(["promote", "assistant", RUN, "--reason", "still", "--store", str(asking.job.store)]) == 2
    assert f"the proposal of '{RUN}' was refused, by record 2" in capsys.readouterr().err


def test_who_answers_after_it_was_signed_at_a_terminal_is_told_that_it_is_so(asking, caplog, heard):
    with asking.job.prefect():
        assert main(["promote", "assistant", RUN, "--reason", "at a terminal", "--store", str(asking.job.store)]) == 0
    assert wait_for(lambda: heard, seconds=60)
    assert [(event.event, event.payload["reason"]) for event in heard] == [
        ("rheostat.registry.promote", "at a terminal")
    ]
    assert asking.resumed(YES).state.name == "Completed"
    assert "registry assistant, record 2: it is so already" in caplog.text
    assert kinds(asking) == ["proposal", "promote"]
    assert len(heard) == 1, "what is so already is no news"


def test_an_answer_after_another_champion_came_is_refused_in_one_line(asking):
    learnt = asking.job.store / "registry/assistant/learnt"

    def other(number, _):
        proposal = asking.registry.records()[0]
        shutil.copy(learnt / f"{RUN}.txt", learnt / "other.txt")
        return proposal.model_copy(update={"number": number, "kind": "promote", "policy": "f" * 64, "run": "other"})

    asking.registry.append(other)
    ended = asking.resumed(YES).state
    assert ended.name == "Failed"
    assert f"'{RUN}' was compared with record 0, and record 2 is champion now: retrain again" in ended.message
    assert kinds(asking) == ["proposal", "promote"]


def test_a_retrain_at_a_terminal_asks_nobody_and_says_how_to_sign(restored, capsys):
    job, (keys, rules) = restored.job, PROPOSING.split("[promotion]")
    (job.home / "tiny.toml").write_text(f"{keys}{TINY}[promotion]{rules}")
    here = ["--store", str(job.store), "--day", "2026-11-02", "pools.cluster=threads", *OVERRIDES]
    with job.prefect():
        assert main(["retrain", str(job.home / "tiny.toml"), *here]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "record   1: proposal",
        f"sign     rheostat promote assistant {RUN} --reason TEXT --store {job.store}",
    ]
    assert kinds(restored) == ["proposal"]
