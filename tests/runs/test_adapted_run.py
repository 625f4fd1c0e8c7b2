"""A whole run that trains adapters: what it leaves in the store, and what people make of it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.in_process import InProcessJob
from tests.support.jobs import RHEOSTAT, ROOT, Ended, Fault, Job, manifests_of, shards_of

pytestmark = [pytest.mark.timeout(2000), pytest.mark.system]  # the fixture is a whole job

ADAPTED = ("update.lora.rank=4", "update.learning_rate=1e-2", "evaluation.problems=4")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, prefect_api) -> InProcessJob:
    """A run of one iteration, continued to two by the same call with more iterations."""
    job = InProcessJob(tmp_path_factory.mktemp("adapted"), prefect_api)
    for iterations in (1, 2):
        job.train(*ADAPTED, f"iterations={iterations}")
    return job


def bundles(job: InProcessJob, key: str) -> dict[str, Path]:
    """Directories that a manifest names."""
    named = json.loads((job.run / f"manifests/{key}.json").read_text())["bundles"]
    return {name: job.run / ref["key"] for name, ref in named.items()}


def exported(job: InProcessJob, *arguments: str) -> Ended:
    return job.command("export-policy", *arguments)


def evaluated(policy: Path, *arguments: str, home: Path) -> str:
    """What `rheostat evaluate` prints of a directory."""
    environment = {**os.environ, "PREFECT_HOME": str(home / "prefect"), "PYTHONPATH": str(ROOT)}
    command = [RHEOSTAT, "evaluate", str(policy), *arguments, "--json"]
    return subprocess.run(command, cwd=home, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout


def test_every_version_has_the_first_ones_weights_and_an_adapter_of_its_own(adapted):
    first, one, two = (bundles(adapted, key) for key in ("policy/initial", "it-0001/update", "it-0002/update"))
    assert first.keys() == {"weights"}
    assert first["weights"] == one["weights"] == two["weights"]
    assert one["adapter"] != two["adapter"]
    assert {path.suffix for path in two["adapter"].iterdir()} == {".json", ".safetensors"}


def test_rollouts_name_the_policy_that_wrote_them_and_every_promise_holds(adapted):
    verified = adapted.command("verify")
    assert (verified.code, verified.output) == (0, "run tiny: every digest and every invariant holds\n")
    report = json.loads(adapted.command("show", "--json").output)
    assert len({iteration["policy"] for iteration in report["iterations"]}) == 2
    assert report["policy"] == str(bundles(adapted, "it-0002/update")["adapter"])
    assert report["base"] == str(bundles(adapted, "policy/initial")["weights"])


def test_the_merged_export_is_one_directory_that_is_measured_as_the_adapter_is(adapted, tmp_path):
    merged = tmp_path / "merged"
    told = json.loads(exported(adapted, "--to", str(merged), "--json").output)
    assert (told["iteration"], told["merged"], told["path"]) == (2, True, str(merged))
    assert {path.name for path in merged.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = exported(adapted, "--to", str(merged))
    assert (again.code, "not there yet" in again.output) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]
    beyond = exported(adapted, "--to", str(tmp_path / "none"), "--iteration", "3")
    assert (beyond.code, "expected 0 to 2" in beyond.output) == (2, True)


@pytest.mark.slow
def test_an_adapter_that_lies_in_a_run_is_evaluated_as_its_merged_export_is(adapted, tmp_path):
    exported(adapted, "--to", str(tmp_path / "merged"))
    adapter = bundles(adapted, "it-0002/update")["adapter"]
    config = ("--config", str(adapted.home / "tiny.toml"))
    found = [evaluated(policy, *config, home=tmp_path) for policy in (adapter, tmp_path / "merged")]
    assert json.loads(found[0]) == json.loads(found[1])


@pytest.mark.slow
def test_adapters_that_retention_lets_go_are_gone_and_their_base_stays(adapted):
    adapted.train(*ADAPTED, "iterations=3")
    assert not list(bundles(adapted, "it-0001/update")["adapter"].glob("*"))
    assert list(bundles(adapted, "policy/initial")["weights"].glob("*.safetensors"))
    gone = exported(adapted, "--to", str(adapted.home / "gone"), "--iteration", "1")
    assert (gone.code, "retention has deleted" in gone.output) == (2, True)
    assert adapted.command("verify").code == 0


@pytest.mark.slow
def test_a_killed_run_with_adapters_continues_to_the_one_that_was_never_killed(adapted, tmp_path, prefect_api):
    job = Job(tmp_path, prefect_api)
    killed = job.train(*ADAPTED, "iterations=2", faults=[Fault("driver", "after", "it-0002/rollout/0000")])
    assert (killed.code != 0, job.struck()) == (True, 1)
    resumed = job.train(*ADAPTED, "iterations=2", faults=[Fault("update-0", "begin", "update .*iteration=2")])
    assert (resumed.code, job.struck()) == (0, 1), resumed.output
    assert manifests_of(job.run).items() <= manifests_of(adapted.run).items()  # that one was evaluated once more
    assert shards_of(job.run) <= shards_of(adapted.run)
