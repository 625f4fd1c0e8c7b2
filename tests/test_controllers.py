"""A controller that fails stops its peers at once, and the run says why."""

import signal
from collections.abc import Callable
from datetime import datetime

import httpx
import pytest

from tests.jobs import RAISE, Fault, Job, wait_for

WITHIN_SECONDS = 5
HANG = Fault("rollout", "begin", "generate .*iteration=1", signal=signal.SIGSTOP)
FAIL = Fault("rollout", "begin", "generate .*iteration=1", signal=RAISE)
TWO_SHARDS = ("iterations=1", "rollout.shard_prompts=3", "evaluation.problems=4")


def stops_at_once(job: Job, *overrides: str, peers_ended: Callable[[], bool]) -> None:
    """Run a job in which one rollout worker hangs and another fails; wait for the peers' end, then for the job's."""
    with job.started(*TWO_SHARDS, *overrides, faults=[HANG, FAIL]) as process:
        assert wait_for((job.home / "struck-1").exists), (job.home / "output").read_text()
        assert wait_for(peers_ended, seconds=WITHIN_SECONDS)
        ended = job.ended(process)
    assert job.struck() == 2
    assert ended.code == 1
    told = ended.output.splitlines()[-1]
    assert told.startswith("rheostat: ")
    assert "RuntimeError: planted fault at generate" in told


def flows(api: str, **names: object) -> list[dict[str, object]]:
    """Flow runs that Prefect's API finds by a filter."""
    asked = {"flow_runs": names}
    found = httpx.post(f"{api}/flow_runs/filter", json=asked, timeout=30).raise_for_status().json()
    return [*found]


def controllers_of(api: str, run: str) -> list[dict[str, object]]:
    """Flow runs of the controllers of a run's first iteration."""
    [train] = flows(api, name={"any_": [run]})
    below = flows(api, parent_flow_run_id={"any_": [train["id"]]})
    [iteration] = (flow for flow in below if flow["name"] == "it-0001")
    return flows(api, parent_flow_run_id={"any_": [iteration["id"]]})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failing_controller_stops_its_peers_within_seconds_and_the_run_names_the_cause(prefect_api, tmp_path):
    def ended() -> bool:
        controllers = controllers_of(prefect_api, "failing")
        return len(controllers) == 4 and all(flow["end_time"] for flow in controllers)

    job = Job(tmp_path, prefect_api)
    stops_at_once(job, "name=failing", peers_ended=ended)
    failed = (job.home / "struck-1").stat().st_mtime
    for flow in controllers_of(prefect_api, "failing"):
        assert datetime.fromisoformat(str(flow["end_time"])).timestamp() - failed < WITHIN_SECONDS
