"""Invalid input to the installed command: exit code, message, and that nothing is written.

Defaults that exceed the data are reduced. Other refusals are in tests/unit/refusals/models.toml.
"""

import os
import re
import subprocess
from pathlib import Path
from threading import Event

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.processes.sandbox import switches_user
from rheostat.infra.store.runs import create_run, open_run
from rheostat.tasks.config.run import load_config
from tests.support.jobs import RHEOSTAT, SEARCH_PATH
from tests.support.processes import process
from tests.support.refusals import tree
from tests.support.sandboxes import MISSING

SANDBOXED_BY_ROOT = (
    "This job runs as root. Sandboxed code (scoring.sandbox) runs as user 65534 and can only read files that every "
    "user of this machine can read. If these settings read other files, make the files readable for all users (chmod "
    "o+r), or run the job as another user."
)


@pytest.fixture
def place(make_job) -> Path:
    return make_job("rows")


@pytest.fixture
def refuse_job(place, capsys):
    """Function that starts the job in this process and returns the line with which the command refuses it."""

    def refuse(*arguments: str) -> str:
        before = tree(place)
        assert main(["train", "job.toml", *arguments]) == 2
        assert tree(place) == before
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), err
        return err

    return refuse


@pytest.mark.smoke
@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "code", "output", "errors"),
    [
        (["--dry-run"], 0, "8 training, 2 held out", ""),
        (["data.path=nowhere.jsonl"], 2, "", "/nowhere.jsonl: no such file\n"),
    ],
)
def test_the_installed_command_checks_a_job_and_writes_nothing(place, arguments, code, output, errors):
    environment = {**os.environ, "PREFECT_HOME": str(place / "prefect"), "PYTHONPATH": SEARCH_PATH}
    before = tree(place)
    command = [RHEOSTAT, "train", "job.toml", *arguments]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert tree(place) == before
    assert (done.returncode, done.stderr.count("\n")) == (code, bool(errors))
    assert output in done.stdout and bool(done.stdout) == bool(output)
    assert done.stderr.endswith(errors)


@pytest.mark.system
def test_a_dry_run_reduces_a_default_that_exceeds_the_number_of_problems(place, capsys):
    document = Path("job.toml").read_text()
    Path("job.toml").write_text(document.replace("prompts = 1\n", "").replace("problems = 1\n", ""))
    assert main(["train", "job.toml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "8 prompts x 8 = 64 completions in 1 shard (data files of up to " in shown
    assert "note: rollout.prompts is 8 instead of its default 64, because there are 8 training problems.\n" in shown
    assert "note: evaluation.problems is 2 instead of its default 256, because there are 2 held-out problems. " in shown


@pytest.mark.smoke
@pytest.mark.system
def test_a_dry_run_reports_settings_that_cannot_take_full_effect(place, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", SEARCH_PATH)  # rewards of tests are not installed
    first, *others = Path("train.jsonl").read_text().strip().splitlines()
    Path("train.jsonl").write_text("\n".join([first, *others[:-1], first]))
    settings = ["rollout.prompts=4", "rollout.group_size=2", "update.minibatches=9", "pools.update_ranks=3"]
    if not MISSING:
        settings += ['scoring.rewards=[{kind="target", target="tests.support.rewards:obedient"}]']
        settings += ["scoring.sandbox=bubblewrap"]
    assert main(["train", "job.toml", *settings, "pools.gpus_per_update_rank=1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    notes = [line.removeprefix("note: ") for line in shown.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("The pools need 3 GPUs (")
    assert notes[1].startswith("update.dtype is 'float32', the default.")
    assert notes[2:] == [
        "update.minibatches is 9, but an iteration has 4 prompts, so it takes 4 optimizer steps. For more steps, raise "
        "rollout.prompts.",
        "pools.update_ranks is 3, but an optimizer step has 2 completions, so some ranks are idle. Lower "
        "pools.update_ranks or update.minibatches, or raise rollout.prompts.",
        "1 of 8 training problems is a duplicate of another. Remove the duplicates from the data to train equally "
        "often on each problem.",
        *([SANDBOXED_BY_ROOT] if switches_user() and not MISSING else []),
    ]
    assert "4 per iteration, 96 remaining" in shown
    assert re.search(r"^GPUs +3: one for each update rank$", shown, re.MULTILINE)


@pytest.mark.skipif(os.access("/proc/sys", os.W_OK), reason="needs a directory that even root cannot write to")
@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_dry_run_and_a_run_both_refuse_a_store_that_cannot_be_written(refuse_job, arguments):
    line = refuse_job("--store", "/proc/sys/runs", *arguments)
    assert "'/proc/sys/runs'" in line and "no write permission for /proc/sys" in line


@pytest.mark.smoke
@pytest.mark.system
def test_a_run_with_results_refuses_another_configuration_and_names_the_difference(place, refuse_job, capsys):
    make_run("seed=1")
    assert main(["train", "job.toml", "--dry-run"]) == 0
    assert re.search(r"^state +new$", capsys.readouterr().out, re.MULTILINE)
    open_run(str(place / "runs"), "job").store.put("manifests/policy/base.json", b"")
    line = refuse_job()
    assert "was created with another configuration: seed was 1, is 0. Restore these settings" in line


@pytest.mark.system
def test_a_run_locked_by_another_process_is_refused_with_the_process_id(place, refuse_job):
    make_run()
    with process(_hold, str(place / "runs"), "job", str(place / "held")) as holder:
        while not (place / "held").exists():
            assert holder.is_alive()
        assert f"is locked by process {holder.pid} on " in refuse_job()


def make_run(*overrides: str) -> None:
    config = load_config(Path("job.toml"), overrides)
    create_run(config.store, "job", config.identity())


def _hold(store: str, name: str, told: str) -> None:
    with open_run(store, name).lock():
        Path(told).touch()
        Event().wait()
