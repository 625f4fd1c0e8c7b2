"""Bisection of two runs: forks of the worse one, in which differences are undone, find the cause."""

import json
import subprocess

import pytest

from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.tasks.forks.bisection import BisectRequest, plan_bisection
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob, copy_job, run_command
from tests.support.jobs import RHEOSTAT, Job, digest_of, kill, wait_for

pytestmark = pytest.mark.timeout(1200)

LENGTH = "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:length', options = {scale = 0.01}}]"
OURS = ("warmup=", "report=false", "evaluation.problems=64", "evaluation.every=0", "iterations=6", LENGTH)


def write_problems(path, count, *, first=0):
    rows = [{"prompt": f"{path.stem} {n} + 1 =", "answer": str(n + 1)} for n in range(first, first + count)]
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def trained(reference, tmp_path_factory) -> InProcessJob:
    """Job with the run `good`, which is trained to generate long completions, and the run `bad`, whose learning rate is
    too low and which has four more problems."""
    job = copy_job(reference, tmp_path_factory.mktemp("bisected") / "job")
    problems, heldout = job.home / "problems.jsonl", job.home / "heldout.jsonl"
    write_problems(heldout, 64)
    data = f'data={{kind = "file", path = "{problems}", heldout_path = "{heldout}"}}'
    write_problems(problems, 40)
    job.train("name=good", "update.learning_rate=3e-2", data, *OURS)
    write_problems(problems, 44)
    job.train("name=bad", "update.learning_rate=1e-6", data, *OURS)
    return job


def request(job, good, bad, name, **settings):
    settings = {"overrides": ("pools.cluster=threads",), "num_row_ranges": 1, **settings}
    return BisectRequest(good=good, bad=bad, name=name, store=str(job.store), **settings)


def bisect(job, good, bad, name, *, max_forks=None, max_hours=None):
    with job.prefect():
        from rheostat.flows.bisect import bisect

        return run_flow(bisect(request(job, good, bad, name), max_forks=max_forks, max_hours=max_hours))


@pytest.mark.thorough
def test_the_cause_is_found_and_a_search_whose_budget_was_spent_continues(trained):
    begun = bisect(trained, "good", "bad", "why", max_forks=1)
    assert (begun.outcome, begun.found, len(begun.trials)) == ("budget", (0, 1), 1)
    result, store = bisect(trained, "good", "bad", "why"), str(trained.store)
    assert [cause.label for cause in result.candidates] == [
        "update.learning_rate",
        "rows 41 to 44 of problems.jsonl",
    ]
    assert result.outcome == "found" and result.found == (0,)
    assert [trial.undone for trial in result.trials] == [(0, 1), (0,)]
    assert result.trials[0] == begun.trials[0]
    assert result.conclusion()[1] == "Cause: update.learning_rate: 1e-06 instead of 0.03."
    first, second = (open_run(store, f"why.fork-{number}") for number in (1, 2))
    assert first.excluded_rows(1) == frozenset(range(40, 44)) and second.excluded_rows(1) == frozenset()
    assert [each.fork.parent for each in (first, second)] == ["bad", "bad"]
    assert verify_run(store, "why.fork-1") == [] == verify_run(store, "why.heldout.fork-1")
    stopped = bisect(trained, "good", "bad", "why", max_hours=0)
    assert (stopped.outcome, stopped.trials) == ("budget", ())


def test_no_fork_is_trained_if_the_run_is_not_worse(trained):
    result = bisect(trained, "bad", "good", "none")
    assert (result.outcome, result.trials) == ("not_worse", ())
    assert result.conclusion()[0].startswith("good is not significantly worse than bad: held-out score")
    assert not any(name.startswith("none.fork") for name in list_runs(str(trained.store)))


def test_dry_run_lists_the_differences_and_writes_nothing(trained):
    before = list_runs(str(trained.store))
    words = ("good", "bad", "plan", "pools.cluster=threads", "--row-ranges", "2", "--dry-run")
    shown = run_command("bisect", *words, "--store", str(trained.store))
    assert shown.code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0] == "bisect   bad is compared with good. 3 differences:"
    assert lines[3].startswith("  3  rows 43 to 44 of problems.jsonl: not in good, or with another answer or other")
    assert lines[4] == "trains   up to 4 forks of bad@0, each 6 iterations"
    assert list_runs(str(trained.store)) == before


@pytest.mark.parametrize(
    ("good", "bad", "name", "settings", "message"),
    [
        ("good", "good", "why", {}, "needs two different runs"),
        ("goood", "bad", "why", {}, "There is no run 'goood'"),
        ("good", "bad", "w" * 50, {}, "at most 48 characters"),
        ("good", "bad", "why", {"overrides": ("update.epochs=2",)}, "update.epochs affects the training"),
    ],
)
def test_a_bisection_that_is_not_possible_is_refused(trained, good, bad, name, settings, message):
    with pytest.raises(BadInput, match=message):
        plan_bisection(request(trained, good, bad, name, **settings))


REWARD = """
def score(prompt, completion, answer):
    return min(1.0, 0.01 * len(completion))
"""


@pytest.mark.system
def test_changed_reward_code_is_found_with_the_code_of_both_folders_also_after_a_kill(tmp_path, prefect_api):
    job, results = Job(tmp_path, prefect_api), {}
    scoring = "scoring.rewards=[{kind = 'target', target = 'grading:score'}]"
    learning = ("update.learning_rate=3e-2", "data.options.heldout_problems=64", *OURS[:-1], scoring)
    for name, code in (("good", REWARD), ("bad", REWARD.replace("0.01 *", "1 - 0.01 *"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "grading.py").write_text(code)
        (tmp_path / name / "tiny.toml").write_text(job.document)
        words = [RHEOSTAT, "train", "tiny.toml", f"name={name}", *learning, "--store", str(job.store)]
        subprocess.run(words, cwd=tmp_path / name, env=job.environment(), check=True, capture_output=True)

    folders = ("--good-code", str(tmp_path / "good"), "--bad-code", str(tmp_path / "bad"))
    for name, is_killed in (("undisturbed", False), ("killed", True)):
        words = [RHEOSTAT, "bisect", "good", "bad", name, *folders, "--store", str(job.store)]
        if is_killed:
            process = subprocess.Popen(words, cwd=tmp_path, env=job.environment(), stderr=subprocess.DEVNULL)
            try:
                seal = job.store / f"{name}.fork-1" / "manifests" / "it-0003" / "seal.json"
                assert wait_for(seal.exists)
            finally:
                kill(process)
        done = subprocess.run([*words, "--json"], cwd=tmp_path, env=job.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        results[name] = json.loads(done.stdout)
    result = results["undisturbed"]
    assert result["outcome"] == "found" and result["candidates"][result["found"][0]]["label"] == "code"
    assert results["killed"]["difference"] == result["difference"]
    assert [each["difference"] for each in results["killed"]["trials"]] == [
        each["difference"] for each in result["trials"]
    ]
    policies = [digest_of(job.store / f"{name}.fork-1", "it-0006/update") for name in results]
    assert len(set(policies)) == 1
