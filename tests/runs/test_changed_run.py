"""A run whose reward code or libraries have changed: refused, or accepted and recorded."""

import json
import shutil

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.store.runs import Run
from rheostat.tasks.config.run import load_config
from rheostat.tasks.run.dependencies import find_matching_run
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob
from tests.support.jobs import ROOT, files_of, manifests_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def job(copied, tmp_path, monkeypatch):
    """Copy of the finished run, with another version of its reward and of torch installed."""
    reward, metadata = (
        tmp_path / "now" / name for name in ("tests/support/rewards.py", "torch-9.9.dist-info/METADATA")
    )
    for path in (reward, metadata):
        path.parent.mkdir(parents=True)
    for package in (reward.parent, reward.parent.parent):
        (package / "__init__.py").touch()
    reward.write_text((ROOT / "tests/support/rewards.py").read_text() + "# edited\n")
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path / "now"))
    monkeypatch.chdir(tmp_path / "now")  # where processes of rewards look first
    return copied


def train(job: InProcessJob, *arguments: str) -> int:
    with job.prefect():
        here = ("pools.cluster=threads", "--store", str(job.store))
        return main(["train", str(job.home / "tiny.toml"), *arguments, *here])


def find_resumable(job: InProcessJob) -> Run | None:
    """Return what the same command would continue with. Raises RunChanged if it may not continue."""
    return find_matching_run(load_config(job.home / "tiny.toml", [f"store={job.store}"]))


@pytest.mark.smoke
@pytest.mark.system
def test_a_changed_reward_and_library_are_refused_by_name_until_accepted(job, capsys):
    before, made = files_of(job.run), manifests_of(job.run)
    for arguments in ([], ["iterations=4"], ["--dry-run"]):
        assert train(job, *arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        changes, _, remedy = err.partition("libraries or ranks: ")[2].partition(". Use ")
        reward, torch = changes.split("; ")
        assert reward.startswith("reward tests.support.rewards:even: module tests.support.rewards was ")
        assert torch.startswith("torch was ") and torch.endswith(", is 9.9")
        assert remedy.startswith("--accept-change ")
    assert files_of(job.run) == before
    assert "from iteration" not in job.command("show").output
    assert train(job, "--accept-change") == 0
    told = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert f"warning: run tiny continues from iteration 4 with changes: {reward}; {torch}" in told
    assert f"from iteration 4 on: {reward}; {torch}\n" in job.command("show").output
    assert find_resumable(job) is not None, "what was accepted is the run's own from then on"
    (change,) = json.loads(job.command("show", "--json").output)["changes"]
    assert (change["iteration"], change["changes"]) == (4, [reward, torch])
    assert manifests_of(job.run) == made
    assert verify_run(str(job.store), "tiny") == []


def test_every_chain_record_names_the_dependencies_of_its_stage(reference):
    links = [json.loads(path.read_text()) for path in sorted(reference.run.glob("chain/*"))]
    assert len(links) == 5
    assert all("dependencies/0001" in link["journal"] for link in links)
    assert not any("dependencies" in path.read_text() for path in reference.run.rglob("manifests/**/*.json"))


def test_a_run_of_an_older_rheostat_is_valid_and_may_continue(copied):
    for folder in ("chain", "journal/dependencies"):
        shutil.rmtree(copied.run / folder)
    assert verify_run(str(copied.store), "tiny") == []
    assert find_resumable(copied) is not None
    assert json.loads(copied.command("show", "--json").output)["changes"] == []
