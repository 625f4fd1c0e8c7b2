"""Progress of a run, read from copies of the finished run without the results of later stages."""

import io
import json
import os
import shutil
import socket
from datetime import datetime, timedelta

import pytest
from rich.console import Console

from rheostat.flows.cli.live import draw_page, draw_sparkline
from rheostat.infra.store.progress import StepNotes, newest_note
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.storage import open_store
from rheostat.infra.terminal import WIDTH
from rheostat.tasks.views.run_progress import ProgressReader, find_lock_holder

LEFT = {
    "manifests/it-0003/seal.json": "iteration 3: seal",
    "manifests/it-0003/update.json": "iteration 3: update",
    "manifests/it-0003/credit.json": "iteration 3: credit",
    "manifests/it-0003/scoring/0002.json": "iteration 3: scoring",
    "manifests/it-0003/rollout/0002.json": "iteration 3: rollout",
    "manifests/it-0003/plan.json": "iteration 3: plan",
}
"""Results of an iteration, the last one first, and the activity of a run without each result."""


@pytest.fixture
def store(reference, tmp_path):
    """Store with a copy of the finished run without its last evaluation, so that the run is not over."""
    shutil.copytree(reference.run, tmp_path / "tiny")
    shutil.rmtree(tmp_path / "tiny/manifests/eval-0003")
    for link in (tmp_path / "tiny/chain").glob("*-eval-0003.json"):
        link.unlink()
    return tmp_path


def text_of(standing):
    """Return the page as a terminal shows it, without colours."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, force_terminal=True, color_system=None).print(draw_page(standing, seconds=61))
    return out.getvalue()


def test_the_activity_of_a_run_is_its_first_missing_stage(store):
    told = []
    for path in LEFT:
        (store / "tiny" / path).unlink()
        told.append(ProgressReader(str(store), "tiny", 3).read_progress().activity)
    assert [activity.description for activity in told] == [*LEFT.values()]
    assert [(activity.done, activity.total) for activity in told[2:5]] == [(3, 3), (2, 3), (2, 3)]


@pytest.fixture
def generating(store):
    """Store whose run is in the rollout stage of its third iteration."""
    for path in LEFT:
        if "plan" not in path:
            (store / "tiny" / path).unlink()
    return store


def test_tokens_per_second_are_those_of_the_stored_shards(generating):
    run = open_run(str(generating), "tiny")
    tokens = sum(run.require(f"it-0003/rollout/000{shard}").metrics["tokens"] for shard in (0, 1))
    began = datetime.fromisoformat(run.require("it-0003/plan").provenance.created)
    activity = ProgressReader(str(generating), "tiny", 3).read_progress(began + timedelta(seconds=2)).activity
    assert activity.note == f"{tokens / 2:,.0f} tokens/s"


def test_the_page_has_the_stage_the_shards_and_the_remaining_time_and_fits_its_columns(generating):
    standing = ProgressReader(str(generating), "tiny", 1000).read_progress()
    seconds = [report.seconds["total"] for report in standing.reports]
    assert standing.eta_seconds == pytest.approx(sum(seconds) / 2 * 998)
    page = text_of(standing)
    assert max(map(len, page.splitlines())) <= WIDTH
    for part in ("2 of 1000 iterations", "0:01:01", "eta ", "iteration 3: rollout", "2 of 3 shards", "tokens/s"):
        assert part in page


def test_a_watcher_without_the_configuration_reads_the_number_of_iterations_from_the_store(store, reference):
    progress = ProgressReader(str(store), "tiny").read_progress()
    assert (progress.iterations, progress.is_finished) == (3, False)
    whole = ProgressReader(str(reference.store), "tiny").read_progress()
    assert whole.is_finished
    assert [accuracy.number for accuracy in whole.evaluations] == [0, 3]


def test_a_running_warm_up_shows_its_steps_and_its_loss_and_leaves_no_files(store):
    run = store / "tiny"
    shutil.rmtree(run / "manifests")
    shutil.copytree(store / "tiny", store / "other")
    clock = iter([0.0, 1.0, 4.0, 4.0, 8.0, 8.0])
    notes = StepNotes(open_store(str(run)), clock=lambda: next(clock))
    notes.report(10, 300, 2.0)  # too soon after the beginning to be worth a write
    assert newest_note(open_store(str(run))) is None
    notes.report(40, 300, 1.5)
    notes.report(80, 300, 1.25)
    activity = ProgressReader(str(store), "tiny", 3).read_progress().activity
    assert (activity.done, activity.total, activity.unit, activity.note) == (80, 300, "steps", "loss 1.250")
    assert len([*(run / "report/steps").iterdir()]) == 1
    StepNotes(open_store(str(run)))  # another training begins where this one was killed
    assert newest_note(open_store(str(run))) is None
    notes.end()


def test_only_a_live_process_counts_as_the_holder_of_a_run(store):
    run = open_run(str(store), "tiny")
    lock = store / "tiny" / "lock"
    lock.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    assert find_lock_holder(run) == f"process {os.getppid()} on {socket.gethostname()}"
    lock.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))  # beyond the kernel's greatest
    assert find_lock_holder(run) is None
    lock.write_text("")
    assert find_lock_holder(run) is None


def test_sparklines_range_from_the_minimum_to_the_maximum_and_skip_missing_values():
    assert draw_sparkline([0.0, None, 0.5, 1.0]) == "▁▅█"
    assert draw_sparkline([0.2, 0.2]) == "▁▁"
    assert draw_sparkline([None]) == ""
