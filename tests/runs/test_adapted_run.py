"""A whole run that trains adapters: the bundles in the store, the export and the evaluation."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.in_process import InProcessJob, copy_job
from tests.support.jobs import RHEOSTAT, SEARCH_PATH, bundles_of
from tests.support.whole_runs import read_families

pytestmark = [pytest.mark.timeout(2000), pytest.mark.system]


@pytest.fixture
def adapted(undisturbed) -> InProcessJob:
    return undisturbed("adapters")


def evaluate(policy: Path, *arguments: str, home: Path) -> str:
    """Return what `rheostat evaluate` prints about a policy directory."""
    environment = {**os.environ, "PREFECT_HOME": str(home / "prefect"), "PYTHONPATH": SEARCH_PATH}
    command = [RHEOSTAT, "evaluate", str(policy), *arguments, "--json"]
    return subprocess.run(command, cwd=home, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout


def test_every_version_consists_of_the_initial_weights_and_a_separate_adapter(adapted):
    first, one, two = (bundles_of(adapted.run, key) for key in ("policy/initial", "it-0001/update", "it-0002/update"))
    assert first.keys() == {"weights"}
    assert first["weights"] == one["weights"] == two["weights"]
    assert one["adapter"] != two["adapter"]
    assert {path.suffix for path in two["adapter"].iterdir()} == {".json", ".safetensors"}


def test_show_reports_the_adapter_and_the_base_model_of_a_valid_run(adapted):
    verified = adapted.command("verify")
    assert (verified.code, verified.output) == (0, "run tiny: every digest and every invariant holds\n")
    report = json.loads(adapted.command("show", "--json").output)
    assert len({iteration["policy"] for iteration in report["iterations"]}) == 2
    assert report["policy"] == str(bundles_of(adapted.run, "it-0002/update")["adapter"])
    assert report["base"] == str(bundles_of(adapted.run, "policy/initial")["weights"])


def test_export_policy_merges_the_adapter_into_a_new_directory(adapted, tmp_path):
    merged = tmp_path / "merged"
    told = json.loads(adapted.command("export-policy", "--to", str(merged), "--json").output)
    assert (told["iteration"], told["merged"], told["path"]) == (2, True, str(merged))
    assert {path.name for path in merged.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = adapted.command("export-policy", "--to", str(merged))
    assert (again.code, "new or empty directory" in again.output) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]
    beyond = adapted.command("export-policy", "--to", str(tmp_path / "none"), "--iteration", "3")
    assert (beyond.code, "from 0 (the initial policy) to 2" in beyond.output) == (2, True)


@pytest.mark.slow
def test_an_adapter_and_its_merged_export_have_the_same_evaluation(adapted, tmp_path):
    adapted.command("export-policy", "--to", str(tmp_path / "merged"))
    adapter = bundles_of(adapted.run, "it-0002/update")["adapter"]
    config = ("--config", str(adapted.home / "tiny.toml"))
    found = [evaluate(policy, *config, home=tmp_path) for policy in (adapter, tmp_path / "merged")]
    assert json.loads(found[0]) == json.loads(found[1])


@pytest.mark.slow
def test_retention_deletes_old_adapters_but_not_their_base_model(adapted, tmp_path, together):
    job = copy_job(adapted, tmp_path / "job")
    job.train(*read_families()["adapters"].settings(together), "iterations=3")
    assert not list(bundles_of(job.run, "it-0001/update")["adapter"].glob("*"))
    assert list(bundles_of(job.run, "policy/initial")["weights"].glob("*.safetensors"))
    gone = job.command("export-policy", "--to", str(tmp_path / "gone"), "--iteration", "1")
    assert (gone.code, "deleted by retention" in gone.output) == (2, True)
    assert job.command("verify").code == 0
