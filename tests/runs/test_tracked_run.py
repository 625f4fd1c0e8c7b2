"""Iterations and evaluations are mirrored from the store to trackers that work, fail, or do not answer."""

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rheostat.infra.store.copies import copy_run
from rheostat.infra.store.runs import METRICS, create_run, open_run
from rheostat.tasks.config.run import parse_config
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.tracking import mirror
from rheostat.tasks.tracking.exporter import RunsCollector
from rheostat.tasks.tracking.metrics_file import extend_metrics
from rheostat.tasks.tracking.mirror import final_policy_of
from rheostat.tasks.tracking.points import PointName, points_after, subject_of
from rheostat.tasks.tracking.samples import COLUMNS, chosen_rows, sample_table
from rheostat.tasks.views.metrics import evaluations_of, reports_of
from tests.support.demos import ARITHMETIC
from tests.support.in_process import InProcessJob
from tests.support.jobs import RHEOSTAT, ROOT, manifests_of, wait_for
from tests.support.pages import is_documented
from tests.support.trackers import tensorboard_series

pytestmark = pytest.mark.timeout(1200)

ORDER = [("evaluation", 0), ("iteration", 1), ("iteration", 2), ("iteration", 3), ("evaluation", 3)]
"""Points of the tiny run that trackers must receive."""
OWN = "{kind='target', target='tests.support.trackers:%s', options={%s}}"


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_positions(lines) -> list[tuple[object, object]]:
    return [(line["series"], line["step"]) for line in lines]


# ---- metrics.jsonl


def test_the_metrics_file_has_a_line_per_iteration_and_evaluation(reference):
    lines, run = lines_of(reference.run / METRICS), open_run(str(reference.store), "tiny")
    assert read_positions(lines) == ORDER
    reports = reports_of(run, term="target")
    told = [line for line in lines if line["series"] == "iteration"]
    assert [line["credit/term_target_mean"] for line in told] == [report.accuracy for report in reports]
    assert [line["update/kl_old"] for line in told] == [report.kl for report in reports]
    assert [line["seconds/total"] for line in told] == [report.seconds["total"] for report in reports]
    assert [line["credit/groups_without_spread"] for line in told] == [
        1 - line["credit/informative_groups"] / line["credit/groups"] for line in told
    ]
    held_out = [line["eval/accuracy"] for line in lines if line["series"] == "evaluation"]
    assert held_out == [accuracy.mean for accuracy in evaluations_of(run)]


def test_the_metrics_page_explains_every_name_in_the_metrics_file(reference):
    names = {name for line in lines_of(reference.run / METRICS) for name in line} - {"series", "step"}
    assert [name for name in sorted(names) if not is_documented(name)] == []


@pytest.mark.parametrize("damage", ["gone", "torn", "cut", "another", "whole"])
def test_a_missing_or_torn_metrics_file_is_restored_byte_for_byte(copied, damage):
    path, run = copied.run / METRICS, open_run(str(copied.store), "tiny")
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    left = {"gone": "", "torn": whole[:-3], "cut": "".join(lines[:2]), "another": "no metrics\n", "whole": whole}
    path.unlink() if damage == "gone" else path.write_text(left[damage])
    extend_metrics(run)
    assert path.read_text() == whole


def test_the_metrics_file_is_neither_copied_nor_verified(copied, tmp_path):
    (copied.run / METRICS).write_text("anything\n")
    ended = copied.command("verify")
    assert ended.code == 0 and METRICS not in ended.output
    made = copy_run("tiny", str(copied.store), str(tmp_path / "other"))
    assert not made.run.store.exists(METRICS)
    extend_metrics(made.run)
    copy_run("tiny", str(copied.store), str(tmp_path / "other"))


def test_points_are_ordered_and_an_evaluation_follows_its_iteration(reference):
    run = open_run(str(reference.store), "tiny")
    assert [(place.series, place.step) for place in points_after(run, None)] == ORDER
    for done, place in enumerate(ORDER, start=1):
        assert [(each.series, each.step) for each in points_after(run, PointName(*place))] == ORDER[done:]


# ---- identity


def test_tracking_is_not_in_the_identity_of_a_run_and_a_recreated_run_is_new_to_trackers(tmp_path):
    plain = parse_config({"data": ARITHMETIC}, source="plain")
    tracked = parse_config(
        {"data": ARITHMETIC, "tracking": [{"kind": "wandb", "project": "assistant"}]}, source="tracked"
    )
    assert plain.identity() == tracked.identity()
    runs = [create_run(str(tmp_path / name), "demo.v2", plain.identity()) for name in "ab"]
    later = runs[1].record.model_copy(update={"created": "2030-01-01T00:00:00+00:00"})
    runs[1].record = later
    first, second = (subject_of(run).identity for run in runs)
    assert first != second and second == f"demo-v2-{later.fingerprint[:8]}-20300101000000"


# ---- samples


def test_tracked_samples_are_the_best_the_worst_and_some_at_random(reference):
    run = open_run(str(reference.store), "tiny")
    table = sample_table(run, 2)
    assert table == sample_table(run, 2)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
    assert [row["why"] for row in rows] == ["best"] * 4 + ["worst"] * 4 + ["random"] * 8
    stored = {
        (row["prompt_id"], row["sample"]): row
        for row in json.loads(reference.command("rollouts", "--iteration", "2", "--limit", "99", "--json").output)
    }
    rewards = sorted(row["reward"] for row in stored.values())
    assert [row["reward"] for row in rows[:8]] == [*rewards[-4:], *rewards[3::-1]]
    assert len({(row["prompt_id"], row["sample"]) for row in rows}) == 16
    for row in rows:
        same = stored[row["prompt_id"], row["sample"]]
        assert [row[name] for name in ("prompt", "completion", "reward", "tokens")] == [
            same[name] for name in ("prompt", "completion", "reward", "tokens")
        ]


def test_few_completions_are_shown_once_each_and_completions_without_reward_at_random(reference):
    import numpy as np

    nan = float("nan")
    assert chosen_rows(np.array([0.0, 1.0, nan]), seed=1) == {1: "best", 0: "best", 2: "random"}
    assert list(chosen_rows(np.arange(9.0), seed=1).values()) == ["best"] * 4 + ["worst"] * 4 + ["random"]
    many = np.arange(40.0)
    assert chosen_rows(many, seed=1) != chosen_rows(many, seed=2)


# ---- Prometheus


def test_prometheus_gets_the_newest_metrics_of_every_run_and_the_dashboard_queries_no_others(reference):
    told = {family.name: family for family in RunsCollector(str(reference.store), []).collect()}
    last = lines_of(reference.run / METRICS)
    values = {name: family.samples[0].value for name, family in told.items()}
    assert values["rheostat_iteration"] == 3 and values["rheostat_evaluation"] == 3
    assert values["rheostat_credit_reward_mean"] == last[3]["credit/reward_mean"]
    assert values["rheostat_eval_accuracy"] == last[4]["eval/accuracy"]
    assert {sample.labels["run"] for family in told.values() for sample in family.samples} == {"tiny"}
    dashboard = json.loads((Path(__file__).parents[2] / "infra/grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for name in told if any(name in expression for expression in asked)}
    assert len(named) >= len(dashboard["panels"]) > 5
    for expression in asked:
        assert any(name in expression for name in told), expression


def test_the_page_for_prometheus_is_served_until_ctrl_c(reference):
    command = [RHEOSTAT, "metrics", "tiny", "--port", "0", "--store", str(reference.store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            page = httpx.get(serving.stdout.readline().strip()).text
            assert 'rheostat_iteration{run="tiny"} 3.0' in page.splitlines()
        finally:
            serving.send_signal(signal.SIGINT)
    assert serving.returncode == 0


# ---- trackers


@pytest.mark.system
def test_a_run_continues_while_trackers_fail_and_the_trackers_catch_up_later(
    tmp_path, prefect_api, reference, monkeypatch, caplog
):
    monkeypatch.setattr(mirror, "PATIENCE_SECONDS", 15.0)
    blocker, written = tmp_path / "blocker", tmp_path / "written"
    blocker.touch()
    down = OWN % ("DownTracker", f"path='{written}', blocker='{blocker}'")
    silent, board = OWN % ("HangingTracker", ""), f"{{kind='tensorboard', directory='{tmp_path}/board'}}"
    job = InProcessJob(tmp_path, prefect_api)
    with caplog.at_level(logging.WARNING):
        job.train(f"tracking=[{down}, {silent}, {board}]")
    assert manifests_of(job.run) == manifests_of(reference.run)
    assert "ConnectionError: nobody listens at tracker.example.com; the run continues" in caplog.text
    assert "is missing a part of the run. Send it with `rheostat track tiny --tracking CONFIG`" in caplog.text
    assert caplog.text.count("nobody listens") == 1, "a problem is told once"
    subject = subject_of(open_run(str(job.store), "tiny"))
    series = tensorboard_series(tmp_path / "board" / subject.identity)
    assert set(series.values()) == {1}
    assert sorted(step for tag, step in series if tag == "credit/reward_mean") == [1, 2, 3]
    assert sorted(step for tag, step in series if tag == "eval/accuracy") == [0, 3]

    blocker.unlink()
    caught = job.command("track", "--tracking", f"tracking=[{down}, {board}]", "--json")
    assert caught.code == 0
    told = {report["tracker"]: report["points"] for report in json.loads(caught.output)["trackers"]}
    assert told == {"tests.support.trackers:DownTracker": 5, "tensorboard": 0}
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [(series, step) for series, step, _, _ in lines] == ORDER
    assert [rows for *_, rows in lines] == [None, 16, 16, 16, None]
    assert written.with_suffix(".ended").read_text() == final_policy_of(open_run(str(job.store), "tiny")).digest

    job.train("iterations=4", f"tracking=[{down}, {board}]")
    assert len(written.read_text().splitlines()) == 7
    series = tensorboard_series(tmp_path / "board" / subject.identity)
    assert set(series.values()) == {1}
    assert sorted(step for tag, step in series if tag == "credit/reward_mean") == [1, 2, 3, 4]
    assert "tracking" not in open_run(str(job.store), "tiny").record.config


KILLED = """
import os, signal, sys
from rheostat.infra.store.runs import open_run
from rheostat.tasks.tracking.mirror import tracker_processes_of
from tests.support.trackers import FileTracker
trackers = tracker_processes_of(open_run(sys.argv[1], "tiny"), [FileTracker(path=sys.argv[2])])
trackers.request_sync()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.system
def test_trackers_receive_every_sealed_iteration_of_a_killed_run(copied):
    written = copied.home / "written"
    command = [sys.executable, "-c", KILLED, str(copied.store), str(written)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert wait_for(written.with_suffix(".ended").exists)
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [(series, step) for series, step, *_ in lines] == ORDER


@pytest.mark.system
def test_a_command_reports_which_tracker_is_behind_and_why(copied, monkeypatch):
    monkeypatch.setattr(mirror, "PATIENCE_SECONDS", 15.0)
    blocker = copied.home / "blocker"
    blocker.touch()
    down = OWN % ("DownTracker", f"path='{copied.home}/written', blocker='{blocker}'")
    ended = copied.command("track", "--tracking", f"tracking=[{down}, {OWN % ('HangingTracker', '')}]")
    assert ended.code == 1
    assert "DownTracker: not up to date: ConnectionError: nobody listens at tracker.example.com" in ended.output
    assert "HangingTracker: not up to date: no answer for " in ended.output


def test_an_unknown_tracker_is_refused_in_one_line(copied):
    ended = copied.command("track", "--tracking", 'kind="tensrboard"')
    assert (ended.code, ended.output) == (
        2,
        "rheostat: --tracking: tracking.0.kind must be 'tensorboard' or 'mlflow' or 'wandb' or 'target', got "
        "'tensrboard'; did you mean 'tensorboard'?\n",
    )


def test_metrics_are_written_without_any_tracker(copied):
    whole = (copied.run / METRICS).read_text()
    (copied.run / METRICS).write_text("")
    ended = copied.command("track")
    assert (ended.code, ended.output) == (0, f"run tiny: {copied.run / METRICS}\n")
    assert (copied.run / METRICS).read_text() == whole


def test_rollouts_that_were_deleted_leave_no_samples(copied):
    run = open_run(str(copied.store), "tiny")
    from rheostat.infra.store.garbage import delete_run

    with run.lock():
        delete_run(run, why="a test")
    assert sample_table(open_run(str(copied.store), "tiny"), 2) is None
    assert run.has(StageKey.of(iteration_key(2), "seal"))
