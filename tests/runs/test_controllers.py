"""A controller that fails stops its peers at once, and the run reports the reason."""

from datetime import datetime

import httpx
import pytest

from rheostat.infra.errors import WorkerFailed, WorkerLost, first_cause
from tests.support.controllers import FAIL, HANG, TWO_SHARDS, WITHIN_SECONDS, names_the_cause
from tests.support.jobs import PASSWORD, Job


def flows(api: str, **names: object) -> list[dict[str, object]]:
    """Flow runs that Prefect's API finds by a filter."""
    asked = {"flow_runs": names}
    found = httpx.post(f"{api}/flow_runs/filter", json=asked, auth=PASSWORD, timeout=30).raise_for_status().json()
    return [*found]


def controllers_of(api: str, run: str) -> list[dict[str, object]]:
    """Flow runs of a run's rollout and scoring controllers."""
    [train] = flows(api, name={"any_": [run]})
    below = flows(api, parent_flow_run_id={"any_": [train["id"]]})
    return [flow for flow in below if str(flow["name"]).startswith(("rollout", "scoring"))]


def test_the_first_error_of_the_product_in_a_group_is_the_cause():
    cause = WorkerFailed("rollout.generate raised")
    together = ExceptionGroup("rollout", [ConnectionError(), ExceptionGroup("tasks", [cause, WorkerLost("later")])])
    assert first_cause(together) is cause
    assert first_cause(cause) is cause


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failing_controller_stops_its_peers_within_seconds_and_the_run_names_the_cause(prefect_api, tmp_path):
    job = Job(tmp_path, prefect_api)
    assert names_the_cause(job, job.train(*TWO_SHARDS, "name=failing", faults=[HANG, FAIL]))
    failed = (job.home / "struck-1").stat().st_mtime
    ends = [datetime.fromisoformat(str(flow["end_time"])) for flow in controllers_of(prefect_api, "failing")]
    assert len(ends) >= 2  # scoring controllers may not have begun
    assert max(end.timestamp() for end in ends) - failed < WITHIN_SECONDS
