"""Output of a run on a real terminal: the live page, the lines that stay, and the lines at the end."""

import json
import os
import re
import shutil
import socket

import pytest

from rheostat.flows.cli import live
from rheostat.flows.cli.options import LineHandler, attach_handler
from rheostat.infra.terminal import WIDTH
from rheostat.tasks.views.run_progress import Activity
from tests.support.jobs import RHEOSTAT, Job, wait_for
from tests.support.terminal import COLOUR, on_terminal, plain_screen, screen

pytestmark = pytest.mark.timeout(1200)


def test_watch_shows_a_run_of_another_process_until_it_ends(reference, tmp_path):
    shutil.copytree(reference.run, tmp_path / "tiny")
    links = [*(tmp_path / "tiny/chain").glob("*-eval-0003.json")]
    parts = [tmp_path / "tiny/manifests/eval-0003/summary.json", *links]
    for part in parts:
        shutil.move(part, tmp_path / part.name)
    lock = {"pid": os.getpid(), "host": socket.gethostname()}  # this test is who trains it
    (tmp_path / "tiny/lock").write_text(json.dumps(lock))
    pages = []

    def finish(sent: str) -> None:
        if "3 of 3 iterations" in sent and "held-out evaluation" in sent and not pages:
            pages.append(plain_screen(screen(sent)))
            for part in parts:
                shutil.move(tmp_path / part.name, part)

    code, sent = on_terminal([RHEOSTAT, "watch", "tiny", "--store", str(tmp_path)], env={"NO_COLOR": "1"}, seen=finish)
    assert code == 0
    [page] = pages
    assert any(re.match(r"held-out evaluation .* 1 of 1 shards", line) for line in page), page
    assert max(map(len, page)) <= WIDTH
    lines = [line for line in plain_screen(screen(sent)) if line]
    assert lines[-1] == "run tiny: 3 of 3 iterations", "the page goes, the lines stay"
    assert [line[:14] for line in lines if line.startswith("iteration")] == [f"iteration   {n}/" for n in (1, 2, 3)]
    assert lines[-2].startswith("held-out accuracy after 3 iterations: ")
    assert not [found for found in COLOUR.findall(sent) if re.search(r"[34]\d", found)], "NO_COLOR was asked for"
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l"), "the cursor is there again"


def test_long_work_is_reported_in_lines_if_nothing_else_is_printed(reference, monkeypatch):
    monkeypatch.setattr(live, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    lines = list[str]()
    attach_handler(LineHandler(lambda line, level: lines.append(line)))
    with live._report_long_work(str(reference.store), "tiny", 3):
        wait_for(lambda: len(lines) > 1)
    assert set(lines) == {"next iteration"}


@pytest.mark.parametrize(
    ("activity", "line"),
    [
        (Activity("warm-up", 300, 1200, "steps", "loss 0.412"), "warm-up: 300 of 1,200 steps  loss 0.412"),
        (Activity("starting workers"), "starting workers"),
        (Activity("writing \x1b[31m", note="2 s"), "writing \\u001b[31m: 2 s"),
    ],
)
def test_an_activity_is_one_line_without_control_characters(activity, line):
    assert live.describe_activity(activity) == line


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("command", [["show", "tiny"], ["runs"]])
def test_tables_fit_a_terminal_of_80_columns(reference, command):
    code, sent = on_terminal([RHEOSTAT, *command, "--store", str(reference.store)], columns=80)
    lines = plain_screen(sent.splitlines())
    assert code == 0
    assert [line for line in lines if len(line) > 80 and "/" not in line] == [], "a path stays whole"
    assert any(line.startswith("columns that do not fit: ") for line in lines)


SHOWN = (r"training on data .* of 500 steps  loss \d", r"of 3 iterations  \d+:\d\d:\d\d  eta")
"""Lines of the live page during the warm-up and during the iterations."""


@pytest.mark.system
def test_train_on_a_terminal_shows_its_progress_and_hides_the_output_of_libraries(tmp_path):
    job, found = Job(tmp_path), set()

    def look(sent: str) -> None:
        """Render the screen only if the newest output has a line that is still missing, because rendering is slow."""
        for line in {*SHOWN} - found:
            if re.search(line, COLOUR.sub("", sent[-4000:])):
                found.update({line} if any(re.search(line, each) for each in plain_screen(screen(sent))) else ())

    command = [RHEOSTAT, "train", str(job.configured()), "warmup.steps=500", "--store", str(job.store)]
    code, sent = on_terminal(command, env=job.environment(), seen=look)
    lines = [line for line in plain_screen(screen(sent)) if line]
    assert code == 0, lines
    assert lines[0].startswith("run tiny: grpo, 3 iterations of 6 prompts × 4 completions, in")
    begun = ("password of Prefect's UI: ", "Prefect's UI: http://127.0.0.1:", "warm-up: ", "held-out accuracy ")
    told = ("iteration ", "warning: ", "         ", "took ", "plot ", "run ", "policy ", "digest ", "next ")
    assert [line for line in lines[1:] if not line.startswith((*begun, *told, "                  after"))] == []
    assert found == {*SHOWN}
