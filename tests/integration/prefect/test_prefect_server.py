"""prefect.yaml against a real Prefect server, with a real worker and real runs."""

import json
import re
import shutil
import subprocess
import time
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import yaml
from prefect import flow, task
from prefect.deployments.steps.core import run_steps

from rheostat.flows.retrain import with_date
from rheostat.infra.errors import Damaged, WorkerFailed, WorkerLost
from rheostat.infra.store.runs import open_run
from rheostat.tasks.config.run import RunConfig, load_config
from rheostat.tasks.run.stages import is_transient
from tests.support.controllers import FAIL, HANG, TWO_SHARDS, WITHIN_SECONDS, names_the_cause
from tests.support.demos import ARITHMETIC, ArithmeticData
from tests.support.deployments import Server, flows_below, process_of_flow, run_worker, serve_deployments
from tests.support.in_process import InProcessJob, prefect_at
from tests.support.jobs import ROOT, TINY, Job, list_running, manifests_of, process_tree, wait_for

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(prefect_api, tmp_path_factory):
    return serve_deployments(prefect_api, tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="module")
def worker(server, tmp_path_factory):
    with run_worker(server, tmp_path_factory.mktemp("worker")) as process:
        yield process


def tiny(store: Path, **changes: object) -> dict[str, object]:
    return {"config": {**tomllib.loads(TINY), "store": str(store), **changes}}


def finish_as(reference: InProcessJob, server: Server, run: str, store: Path) -> bool:
    """Wait for the end of a run; return whether it completed with the manifests of the undisturbed run."""
    assert server.ends(run) == "Completed"
    return manifests_of(store / "tiny") == manifests_of(reference.run)


def messages_of(server: Server, *runs: str) -> list[str]:
    """Return the log messages of flow runs."""
    entries = server.find("logs", logs={"flow_run_id": {"any_": runs}}, limit=200)
    return [entry["message"] for entry in entries]


def await_message(server: Server, run: str, text: str) -> list[str]:
    """Wait until a log message of a flow run contains a text, because Prefect sends messages a moment after they are
    logged, and return all messages."""
    assert wait_for(lambda: text in "".join(messages_of(server, run)), every=0.5)
    return messages_of(server, run)


def engine_of(worker: "subprocess.Popen[bytes]") -> psutil.Process:
    """Return the process in which a worker runs a flow."""
    assert wait_for(lambda: psutil.Process(worker.pid).children())
    return psutil.Process(worker.pid).children()[-1]


@pytest.mark.system
def test_every_deployment_of_the_file_is_on_the_server(server):
    listed = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    found = [d for d in server.find("deployments", limit=50) if d["work_pool_name"]]  # others run nowhere
    assert sorted(d["entrypoint"] for d in found) == sorted(d["entrypoint"] for d in listed)
    assert {d["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"] for d in found} == {
        server.environment["RHEOSTAT_HOME"]
    }
    assert all(d["enforce_parameter_schema"] and "rheostat" in d["tags"] for d in found)


@pytest.mark.system
def test_the_form_describes_each_field_and_its_valid_values(server):
    schema = server.deployment("train/train")["parameter_openapi_schema"]
    rollout = schema["definitions"]["RolloutConfig"]["properties"]
    assert rollout["group_size"]["description"].startswith("Number of completions per prompt. ")
    assert (rollout["group_size"]["minimum"], rollout["group_size"]["maximum"]) == (1, 1024)
    undescribed = [
        f"{model}.{name}"
        for model, definition in schema["definitions"].items()
        for name, field in definition.get("properties", {}).items()
        if name != "kind" and "description" not in field and "$ref" not in field
    ]
    assert undescribed == []
    titles = {
        name: each["title"] for name, each in schema["definitions"].items() if "kind" in each.get("properties", {})
    }
    assert titles["Grpo"] == "grpo: Reward minus the group mean, divided by the standard deviation"
    for choice in schema["definitions"]["RunConfig"]["properties"]["algorithm"]["oneOf"]:
        assert ": " in titles[choice["$ref"].rpartition("/")[2]]


@pytest.mark.system
def test_the_demo_deployment_runs_the_demo_configuration(server):
    parameters = server.deployment("train/demo")["parameters"]
    assert RunConfig.model_validate(parameters["config"]) == load_config(ROOT / "configs" / "demo.toml")


@pytest.mark.system
def test_the_schedule_of_retraining_is_inactive_until_somebody_activates_it(server):
    weekly = server.deployment("retrain/weekly")
    (schedule,) = weekly["schedules"]
    assert schedule["schedule"]["cron"] == "0 3 * * 1"
    assert not schedule["active"]
    assert weekly["global_concurrency_limit"]["limit"] == 1


def test_each_scheduled_retrain_is_a_separate_run():
    config = RunConfig(data=ArithmeticData(), name="nightly", iterations=5)
    named = [with_date(config, datetime(2026, 11, day, 3, tzinfo=UTC)) for day in (23, 30)]
    assert [c.name for c in named] == ["nightly-20261123", "nightly-20261130"]
    assert {c.fingerprint() for c in named} == {config.fingerprint()}


@pytest.mark.system
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"rollout": {"group_size": 0}}, "less than the minimum of 1"),
        ({"rollout": {"grup_size": 8}}, "'grup_size' was unexpected"),
        ({"update": {"learning_rate": "fast"}}, "not of type 'number'"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_starts(server, config, told):
    answer = server.ask("train/train", {"config": {"data": ARITHMETIC} | config})
    assert answer.status_code == 409
    assert told in answer.text


@pytest.mark.system
def test_a_whole_configuration_is_accepted_as_the_form_sends_it(server):
    sent = json.loads(load_config(ROOT / "configs" / "demo.toml").model_dump_json())
    run = server.trigger("train/demo", {"config": sent})
    server.cancel(run)
    assert server.ends(run) == "Cancelled"


@pytest.mark.system
async def test_a_variable_may_name_the_directory_of_a_run_or_a_value_of_its_form(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = replace(server, environment=server.environment | {"RHEOSTAT_HOME": "{{ prefect.variables.rheostat_home }}"})
    named.prefect("deploy", "--name", "evaluate")
    for name, value in {"rheostat_home": str(tmp_path / "later"), "rheostat_store": "s3://bucket/runs"}.items():
        server.prefect("variable", "set", name, value)
    (tmp_path / "later").mkdir()
    with prefect_at(server.api):
        await run_steps(server.deployment("evaluate/evaluate")["pull_steps"])
    assert Path.cwd() == tmp_path / "later"
    store = {"__prefect_kind": "workspace_variable", "variable_name": "rheostat_store"}
    sent = {"name": "first", "data": ARITHMETIC}
    run = server.trigger("train/train", {"config": {"store": store, **sent}})
    assert server.get(f"/flow_runs/{run}")["parameters"]["config"] == {"store": "s3://bucket/runs", **sent}
    server.cancel(run)


@pytest.mark.parametrize(
    ("error", "runs"),
    [
        (WorkerLost("pid 1 died"), 3),
        (ConnectionResetError(), 3),
        (WorkerFailed("wrong shape"), 1),
        (Damaged("torn"), 1),
    ],
)
async def test_a_task_is_retried_after_failures_of_machines_and_networks_only(prefect_api, error, runs):
    counted = []

    @task(retries=2, retry_condition_fn=is_transient)
    async def stage():
        counted.append(error)
        raise error

    @flow
    async def pipeline():
        await stage()

    with prefect_at(prefect_api), pytest.raises(type(error)):
        await pipeline()
    assert len(counted) == runs


@pytest.mark.slow
def test_a_triggered_run_gives_the_same_manifests_and_shows_its_stages(server, worker, reference, tmp_path):
    run = server.trigger("train/train", tiny(tmp_path))
    assert finish_as(reference, server, run, tmp_path)

    shown = server.get(f"/flow_runs/{run}")
    assert shown["name"] == "tiny"
    assert set(shown["tags"]) == {"rheostat", "train"}
    below = {child["name"]: set(child["tags"]) for child in server.below(run)}
    assert {"warm-up", "rollout 0", "rollout 1", "scoring 0", "scoring 1", "update"} <= set(below)
    assert below["rollout 0"] == {"tiny", "rollout"}
    second = server.find("task_runs", task_runs={"tags": {"all_": ["tiny", "it-0002"]}})
    stages = {"it-0002 generate", "it-0002 score", "it-0002 credit", "it-0002 update"}
    assert stages <= {task["name"] for task in second}

    artifacts = server.artifacts(run)
    assert artifacts["tiny-progress"]["data"] == 100
    iterations = json.loads(artifacts["tiny-iterations"]["data"])
    assert [row["iteration"] for row in iterations] == [1, 2, 3]
    rollouts = json.loads(artifacts["tiny-rollouts"]["data"])
    assert len({row["prompt"] for row in rollouts}) == len(rollouts) == 6
    assert "![learning curve](data:image/png;base64," in artifacts["tiny-summary"]["data"]
    assert any("iteration   3/3" in message for message in messages_of(server, run))

    stored = [path.read_bytes() for path in (Path(server.environment["PREFECT_HOME"]) / "storage").iterdir()]
    assert stored
    for result in stored:
        assert len(result) < 10_000
        json.loads(result)


@pytest.mark.system
def test_a_deployed_run_has_the_name_of_its_job_and_logs_bad_input_in_its_last_line(server, worker, tmp_path):
    nowhere = {"policy": {"kind": "directory", "path": "/nowhere"}}
    asked = {
        "tiny": server.trigger("train/train", tiny(tmp_path, **nowhere)),
        "tiny-20261102": server.trigger("retrain/weekly", {**tiny(tmp_path, **nowhere), "day": "2026-11-02"}),
    }
    for name, run in asked.items():
        slip = "BadInput: policy /nowhere: no such directory"
        assert server.ends(run).startswith(f"Failed: Flow run encountered an exception: {slip}")
        assert server.get(f"/flow_runs/{run}")["name"] == name
        messages = await_message(server, run, slip)
        assert slip in messages[-1] and not [message for message in messages if "Traceback" in message]
    assert not (tmp_path / "tiny").exists()


@pytest.mark.slow
def test_a_cancelled_run_leaves_no_process_and_can_be_resumed(server, worker, reference, tmp_path):
    run = server.trigger("train/train", tiny(tmp_path, iterations=500))
    assert wait_for((tmp_path / "tiny/manifests/it-0002/seal.json").exists)
    family = process_tree(engine_of(worker).pid)
    assert len(family) > 3
    server.cancel(run)
    assert server.ends(run) == "Cancelled"
    assert wait_for(lambda: not list_running(family)), list_running(family)
    messages = messages_of(server, run, *(child["id"] for child in server.below(run)))
    assert messages and not [message for message in messages if "Crash" in message]
    assert [message for message in messages if "cancelled. A run of the same name" in message]
    assert not re.search("Traceback|ERROR", Path(psutil.Process(worker.pid).cwd(), "log").read_text())
    open_run(str(tmp_path), "tiny").check_unlocked()

    sealed = len(list(tmp_path.glob("tiny/manifests/it-*/seal.json")))
    again = server.trigger("train/train", tiny(tmp_path, iterations=sealed + 1))
    assert server.ends(again) == "Completed"
    expected = {key: digest for key, digest in manifests_of(reference.run).items() if not key.startswith("eval-0003")}
    assert expected.items() <= manifests_of(tmp_path / "tiny").items()


@pytest.mark.slow
def test_a_killed_run_is_marked_as_crashed_and_resumes_with_the_same_digests(server, worker, reference, tmp_path):
    run = server.trigger("train/train", tiny(tmp_path))
    assert wait_for((tmp_path / "tiny/manifests/it-0002/plan.json").exists)
    engine = engine_of(worker)
    family = process_tree(engine.pid)
    engine.kill()
    assert server.ends(run) == "Crashed"
    assert wait_for(lambda: not list_running(family)), list_running(family)
    assert not (tmp_path / "tiny/manifests/it-0003/seal.json").exists()

    assert finish_as(reference, server, server.trigger("train/train", tiny(tmp_path)), tmp_path)


def deployed(store: Path, **controllers: object) -> dict[str, object]:
    return tiny(store, controllers={"where": "deployment", **controllers})


def ends_of_controllers(server: Server, run: str) -> list[tuple[str, str]]:
    """Return name and final state of each controller of a run, in the order in which they began."""
    found = [child for child in server.below(run) if child["deployment_id"]]
    found.sort(key=lambda child: child["created"])
    return [(child["name"], child["state_name"]) for child in found]


@pytest.mark.slow
def test_deployed_controllers_commit_the_same_manifests_and_start_once_per_span(server, worker, reference, tmp_path):
    run = server.trigger("train/train", deployed(tmp_path, iterations_per_flow_run=2))
    assert finish_as(reference, server, run, tmp_path)
    roles = ("rollout 0", "rollout 1", "scoring 0", "scoring 1", "update")
    names = {f"{role}{later}" for role in roles for later in ("", " from it-0003")}
    assert sorted(ends_of_controllers(server, run)) == sorted((name, "Completed") for name in names)
    assert not (tmp_path / "tiny/orders").exists()


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        pytest.param("rollout 0", "it-0002/plan", marks=[pytest.mark.system, pytest.mark.smoke]),
        pytest.param("update", "it-0001/credit", marks=pytest.mark.slow),
        pytest.param("update", "it-0002/credit", marks=pytest.mark.slow),
    ],
)
def test_a_killed_controller_has_a_successor_and_the_run_ends_with_the_same_digests(
    server, worker, reference, tmp_path, name, moment
):
    run = server.trigger("train/train", deployed(tmp_path, count=1))
    assert wait_for((tmp_path / f"tiny/manifests/{moment}.json").exists)
    process_of_flow(server, worker, name).kill()
    assert finish_as(reference, server, run, tmp_path)
    ends = [(controller.partition(" from ")[0], end) for controller, end in ends_of_controllers(server, run)]
    assert sorted(controller for controller, _ in ends) == sorted(["rollout 0", "scoring 0", "update", name])
    assert [end for controller, end in ends if controller == name] == ["Crashed", "Completed"]
    assert {end for controller, end in ends if controller != name} == {"Completed"}


@pytest.mark.slow
def test_controllers_of_a_killed_driver_fail_with_a_named_error_and_the_run_resumes(
    server, worker, reference, tmp_path
):
    run = server.trigger("train/train", deployed(tmp_path))
    assert wait_for((tmp_path / "tiny/manifests/it-0002/plan.json").exists)
    process_of_flow(server, worker, "tiny").kill()
    assert server.ends(run) == "Crashed"
    assert wait_for(lambda: not flows_below(worker))
    ended = [child["state"] for child in server.below(run) if child["deployment_id"]]
    assert {state["name"] for state in ended} == {"Failed"}
    assert all("ClusterFailed: the Ray cluster at" in state["message"] for state in ended)

    assert finish_as(reference, server, server.trigger("train/train", deployed(tmp_path)), tmp_path)
    assert not (tmp_path / "tiny/orders").exists()


@pytest.mark.slow
def test_cancelling_a_run_cancels_its_deployed_controllers(server, worker, tmp_path):
    run = server.trigger("train/train", tiny(tmp_path, iterations=500, controllers={"where": "deployment"}))
    assert wait_for((tmp_path / "tiny/manifests/it-0002/seal.json").exists)
    server.cancel(run)
    assert server.ends(run) == "Cancelled"
    assert wait_for(lambda: not flows_below(worker)), flows_below(worker)
    open_run(str(tmp_path), "tiny").check_unlocked()


@pytest.mark.slow
def test_a_controller_triggered_alone_completes_its_part_of_a_run(server, worker, reference, tmp_path):
    shutil.copytree(reference.run, tmp_path / "tiny")
    last = tmp_path / "tiny/manifests/it-0003"
    for made in (last / "rollout", last / "scoring"):
        shutil.rmtree(made)
    for made in (last / "update.json", last / "seal.json"):
        made.unlink()
    for role in ("rollout", "scoring", "update"):
        ref = {"store": str(tmp_path), "name": "tiny"}
        run = server.trigger(f"{role}/controller", {"run": ref, "batch": "it-0003"})
        assert server.ends(run) == "Completed"
    expected = manifests_of(reference.run)
    del expected["it-0003/seal"]
    assert manifests_of(tmp_path / "tiny") == expected


@pytest.mark.slow
def test_a_failing_deployed_controller_stops_the_others_and_the_run_names_the_cause(server, worker, tmp_path):
    job = Job(tmp_path, server.api)
    with job.started(*TWO_SHARDS, "controllers.where=deployment", faults=[HANG, FAIL]) as process:
        assert wait_for((tmp_path / "struck-1").exists)
        assert wait_for(lambda: not flows_below(worker))
        seconds = time.time() - (tmp_path / "struck-1").stat().st_mtime
        assert names_the_cause(job, job.ended(process))
    assert seconds < WITHIN_SECONDS
