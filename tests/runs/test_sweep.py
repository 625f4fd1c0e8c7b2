"""A sweep on the command line: killed and resumed, with a point that fails, on files with weights."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from rheostat.infra.store.runs import open_run
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.verification.invariants import check_invariants
from tests.support.jobs import RHEOSTAT, ROOT, SMALLEST_SWEEP, Job, files_of, is_alive, kill, wait_for

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]

GRID = ("rollout.prompts=6,9999,4", *SMALLEST_SWEEP)
KILLED, TOO_LARGE, OTHER = "tiny.prompts-6", "tiny.prompts-9999", "tiny.prompts-4"


def problems(path: Path, count: int) -> Path:
    rows = [{"prompt": f"{path.stem} {n} + 1 =", "answer": str(n + 1)} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def command(tmp_path, prefect_api):
    """Command of the sweep, its environment, and the directory of its runs."""
    few, many = problems(tmp_path / "few.jsonl", 12), problems(tmp_path / "many.jsonl", 60)
    sources = f'[{{path="{few}",weight=3,heldout_fraction=0.2}},{{path="{many}",heldout_fraction=0.2}}]'
    job = Job(tmp_path, prefect_api)
    grid = (*GRID, "data.kind=mixture", f"data.sources={sources}")
    words = [RHEOSTAT, "sweep", str(job.configured()), *grid, "--store", str(job.store), "--limit", "2"]
    return words, job.environment(), job.store


def test_a_killed_sweep_continues_and_a_failed_point_stops_no_other(command, tmp_path):
    words, environment, store = command
    with (tmp_path / "output").open("wb") as output:
        first = subprocess.Popen([*words[:-1], "1"], cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        seal = store / KILLED / "manifests" / "it-0001" / "seal.json"
        assert wait_for(seal.exists), (tmp_path / "output").read_text()
        family = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGKILL)
    finally:
        kill(first)
    assert wait_for(lambda: not any(is_alive(process.pid) for process in family)), "they end with it"
    before = files_of(store / KILLED / "manifests" / "it-0001")

    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, header, killed, too_large, other = done.stdout.splitlines()
    assert header.split() == ["run", "rollout.prompts", "held-out", "accuracy", "took", "status"]
    assert (killed.split()[:2], killed.split()[-1]) == ([KILLED, "6"], "done")
    assert (other.split()[:2], other.split()[-1]) == ([OTHER, "4"], "done")
    assert too_large.split() == [TOO_LARGE, "9999", "-", "-", "failed"]
    [told] = done.stderr.splitlines()
    assert told.startswith(
        "rheostat: 1 of 3 runs of the sweep failed. Run the same command again to continue them. "
        f"Errors: {TOO_LARGE}: data.sources[0]: the weight of this source requires 7499.2 problems"
    )
    assert files_of(store / KILLED / "manifests" / "it-0001") == before, "what was sealed is not made again"
    assert not (store / TOO_LARGE).exists()

    for name in (KILLED, OTHER):
        run = open_run(str(store), name)
        assert check_invariants(run) == []
    few, many = Iteration(open_run(str(store), KILLED), 1).data_parts
    assert (few.weight, many.weight, few.rows.stop) == (3, 1, many.rows.start)

    again = subprocess.run([*words, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 1
    assert [run["status"] for run in json.loads(again.stdout)] == ["done", "failed", "done"]
    assert again.stderr.count("already finished") == 2
