"""The runner of `.ci/run` and `make nightly`: its table, its exit codes, and how it resumes after an interrupt."""

import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.jobs import wait_for

PARTS = Path(__file__).parents[2] / ".ci/parts.py"
SUITES = """
[suite.two]
lanes = [["first", "second"], ["third"]]
[part]
first = "echo started >>starts-first; echo 7 passed in 2 s"
second = "echo $$ >>starts-second; {second}"
third = "echo {{seed}} >starts-third"
"""


@pytest.fixture
def start(tmp_path):
    """Start the runner, in a separate repository, on the suite `two`, whose second part runs the passed command."""
    repository = tmp_path / "repository"
    (repository / ".ci").mkdir(parents=True)
    shutil.copy(PARTS, repository / ".ci")
    (repository / ".gitignore").write_text("build\nsuites.toml\n")
    git = ["git", "-C", repository, "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)

    def start(second: str, *options: str) -> "subprocess.Popen[str]":
        suites = SUITES.replace("starts-", f"{tmp_path}/starts-").format(second=second)
        (repository / ".ci/suites.toml").write_text(suites)
        command = [sys.executable, repository / ".ci/parts.py", "two", *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    return start


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_part_that_fails_is_in_the_table_and_the_other_parts_run(start, tmp_path):
    with start("echo why it failed; exit 3") as runner:
        output = runner.stdout.read()
    assert runner.returncode == 1
    assert "second: FAILED with code 3" in output
    table = {line.split()[0]: line.split(maxsplit=3)[1:] for line in output.splitlines()[-5:-1]}
    assert {name: row[0] for name, row in table.items() if name != "part"} == {
        "first": "passed",
        "second": "FAILED",
        "third": "passed",
    }
    assert table["first"][2] == "7 passed in 2 s" and table["second"][2] == "why it failed"
    assert output.splitlines()[-1].startswith("two: 2 of 3 parts passed")
    [branch] = (tmp_path / "repository/.git/refs/heads").iterdir()
    assert lines_of(tmp_path / "starts-third") == [str(int(branch.read_text()[:7], 16))]


def test_an_interrupted_suite_continues_with_the_parts_that_have_not_passed(start, tmp_path):
    with start("sleep 600") as runner:
        begun = wait_for(lambda: lines_of(tmp_path / "starts-second") and lines_of(tmp_path / "starts-third"))
        assert begun, "the second part has not started"
        runner.send_signal(signal.SIGINT)
        output = runner.stdout.read()
    assert runner.returncode == 130
    assert "not run" in next(line for line in output.splitlines() if line.startswith("second  "))
    [part] = lines_of(tmp_path / "starts-second")
    assert not Path(f"/proc/{part}").exists(), "the part outlived its runner"
    with start("true") as runner:
        output = runner.stdout.read()
    assert runner.returncode == 0
    assert output.splitlines()[-1].startswith("two: 3 of 3 parts passed")
    assert [len(lines_of(tmp_path / f"starts-{name}")) for name in ("first", "second", "third")] == [1, 2, 1]
    with start("true", "--fresh") as runner:
        runner.communicate()
    assert [len(lines_of(tmp_path / f"starts-{name}")) for name in ("first", "second", "third")] == [2, 3, 1]


def test_a_change_of_an_untracked_file_runs_every_part_again(start, tmp_path):
    for text in ("one", "one", "two"):
        (tmp_path / "repository/untracked.py").write_text(text)
        with start("true") as runner:
            runner.communicate()
    assert len(lines_of(tmp_path / "starts-first")) == 2


def test_every_file_with_system_tests_belongs_to_one_part_of_the_nightly_suite():
    home = PARTS.parents[1]
    suites = tomllib.loads(PARTS.with_name("suites.toml").read_text())
    names = [name for lane in suites["suite"]["nightly"]["lanes"] for name in lane if name.startswith("system")]
    places = [
        {path for word in re.findall(r"tests/[^ ']+", suites["part"][name]) for path in home.glob(word)}
        for name in names
    ]
    for file in (home / "tests").rglob("test_*.py"):
        if re.search(r"mark\.system\b", file.read_text()):
            found = [sum(file.is_relative_to(path) for path in part) for part in places]
            assert sorted(found) == [0] * (len(names) - 1) + [1], file


def test_parts_do_not_get_the_options_of_the_suite_from_make(start, tmp_path, monkeypatch):
    monkeypatch.setenv("ARGS", "--fresh")  # as `make nightly ARGS=--fresh` exports it
    with start(f"echo [$ARGS] >{tmp_path}/options") as runner:
        runner.communicate()
    assert lines_of(tmp_path / "options") == ["[]"]


def test_only_the_named_parts_run_and_an_unknown_part_is_refused(start, tmp_path):
    with start("true", "--only", "third", "first") as runner:
        output = runner.stdout.read()
    assert runner.returncode == 0
    assert output.splitlines()[-1].startswith("two: 2 of 2 parts passed")
    assert lines_of(tmp_path / "starts-first") == ["started"]
    assert not (tmp_path / "starts-second").exists()
    with start("true") as runner:
        runner.communicate()
    with start("true", "--fresh", "--only", "first") as runner:  # which keeps the results of the other parts
        runner.communicate()
    with start("true") as runner:
        runner.communicate()
    assert [len(lines_of(tmp_path / f"starts-{name}")) for name in ("first", "second", "third")] == [2, 1, 1]
    with start("true", "--only", "fourth") as runner:
        runner.stdout.read()
    assert runner.returncode == 2
