"""A retrain that waits for its approval form, on a real server. The tests do the work of a worker."""

import json
import tomllib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow as run_flow_of
from prefect.states import Pending

from rheostat.flows.cli.train import run_flow
from rheostat.infra.store.registry import open_registry
from rheostat.tasks.config.run import override_config
from tests.support.in_process import InProcessJob
from tests.support.jobs import PASSWORD, SMALLEST, TINY

PROPOSING = """
[[evaluations]]
name = "sums"
data = {kind = "target", target = "arithmetic:ArithmeticData", options = {heldout_problems = 40}}
problems = 40
[promotion]
registry = "assistant"
primary = {suite = "sums", min_gain = -1}
approve = "manual"
"""
"""Rules by which a policy that learns nothing becomes a proposal."""
OVERRIDES = (*SMALLEST, "iterations=1")

RUN = "tiny-20261102"


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
        """Execute a scheduled flow run as a worker does, and return its state on the server."""
        from rheostat.flows.retrain import retrain

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
        """Submit the form as the UI does, and resume the flow run."""

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
        """Return the content of the gate's artifact."""
        wanted = {"artifacts": {"flow_run_id": {"any_": [str(self.flow_run.id)]}, "key": {"any_": [f"{RUN}-gate"]}}}
        asked = {**wanted, "sort": "CREATED_DESC"}
        found = httpx.post(f"{self.job.api}/artifacts/filter", json=asked, auth=PASSWORD, timeout=30)
        return max(found.raise_for_status().json(), key=lambda artifact: artifact["created"])["data"]

    def another(self) -> "Asking":
        """Trigger the same day's retrain again, up to its form."""
        asking = replace(self, flow_run=create_run(self.job, self.deployment))
        assert asking.goes_on().state.name == "Suspended"
        return asking


def create_run(job: InProcessJob, deployment: UUID) -> FlowRun:
    """Create a run of the deployment that nobody has started."""
    here = (f"store={job.store}", "pools.cluster=threads", *OVERRIDES)
    config = override_config(tomllib.loads(TINY) | tomllib.loads(PROPOSING), here, source="tiny")
    parameters = {"config": config.model_dump(mode="json"), "day": "2026-11-02"}

    async def create():
        async with get_client() as client:
            return await client.create_flow_run_from_deployment(deployment, parameters=parameters)

    with job.prefect():
        return run_flow(create())


async def deploy() -> UUID:
    from rheostat.flows.retrain import retrain

    async with get_client() as client:
        return await client.create_deployment(await client.create_flow(retrain), name="asks", entrypoint="none")


def asked(home: Path, api: str) -> Asking:
    """Run the retrain up to the form."""
    job = InProcessJob(home, api, sends_events=True)
    with job.prefect():
        deployment = run_flow(deploy())
    asking = Asking(job, deployment, create_run(job, deployment))
    assert asking.goes_on().state.name == "Suspended"
    return asking
