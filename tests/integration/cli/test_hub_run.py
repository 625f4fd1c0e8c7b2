"""Runs and rescorings from names of the Hugging Face Hub, whose branches move while they are interrupted."""

import json

import pytest

from rheostat.infra.store.dependencies import recorded_commits
from rheostat.infra.store.runs import open_run
from tests.support.in_process import InProcessJob, copy_job, run_command
from tests.support.jobs import TINY
from tests.support.policies import write_policy
from tests.support.refused_folders import copy_model


def rows(count, *, word="count"):
    problems = [{"question": f"{word} {number}", "answer": str(number)} for number in range(count)]
    return "".join(json.dumps(problem) + "\n" for problem in problems).encode()


def dataset(word):
    return {
        "data/train-00000-of-00001.jsonl": rows(12, word=word),
        "data/test-00000-of-00001.jsonl": rows(8, word=f"held-out {word}"),
    }


@pytest.mark.system
def test_a_run_from_names_of_the_hub_continues_at_its_commits_offline(hub, tmp_path, prefect_api, monkeypatch):
    (tmp_path / "policy").mkdir()
    write_policy(tmp_path / "policy")
    model = hub.add("team/tiny", tmp_path / "policy")
    data = hub.add("team/sums", dataset("count"), kind="dataset")
    names = (
        *("policy.kind=directory", "policy.path=team/tiny", "data.kind=file", "data.path=team/sums"),
        *(
            "data.split=train",
            "data.heldout_split=test",
            "data.prompt_column=question",
            "warmup=",
            "evaluation.problems=4",
        ),
    )
    job = InProcessJob(tmp_path / "job", prefect_api)
    job.train(*names, "iterations=1")
    run = open_run(str(job.store), "tiny")
    assert recorded_commits(run) == {"model team/tiny": model, "dataset team/sums": data}
    assert (run.record.config["policy"]["path"], run.record.config["data"]["path"]) == ("team/tiny", "team/sums")
    hub.add("team/sums", dataset("other"), kind="dataset")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    job.train(*names, "iterations=2")
    assert not hub.requests and recorded_commits(run)["dataset team/sums"] == data
    (tmp_path / "tiny.toml").write_text(TINY)
    plan = run_command("train", str(tmp_path / "tiny.toml"), *names, f"store={job.store}", "iterations=3", "--dry-run")
    assert plan.code == 0 and f"commit {model[:12]}" in plan.output and "dataset team/sums (train)" in plan.output


@pytest.mark.system
def test_a_rescoring_continues_at_the_commit_of_its_judge_offline_and_show_prints_the_commit(
    hub, reference, tmp_path, monkeypatch
):
    copy_model("chat", tmp_path / "judge")
    commit, job = hub.add("team/judge", tmp_path / "judge"), copy_job(reference, tmp_path / "job")
    judge = 'rewards=[{kind="judge",model={kind="directory",path="team/judge"}}]'
    words = ("rescore", "--rewards", judge, "--as", "judged", "pools.cluster=threads")
    assert (first := job.command(*words, "--iterations", "1")).code == 0, first.output
    hub.add("team/judge", {"config.json": b"{}"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert (second := job.command(*words, "--iterations", "2")).code == 0, second.output
    assert not hub.requests
    assert (
        f"rescored as judged: iterations 1-2 (model team/judge at commit {commit[:12]})" in job.command("show").output
    )
    assert job.command("verify").code == 0
