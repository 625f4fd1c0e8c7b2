"""The list of commands is the same in the help, the README, the tests and the shell completion."""

import ast
import functools
import itertools
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rheostat.flows.cli.app import app, main
from rheostat.flows.cli.prefect_api import prefect_api
from rheostat.flows.cli.reference import PAGE, README, commands_of, reference, replace_table
from rheostat.infra.errors import ApiFailed
from rheostat.infra.store.runs import create_run
from rheostat.infra.terminal import parse_port, parse_port_or_free, parse_whole_number
from tests.support.jobs import RHEOSTAT, ROOT
from tests.support.refusals import read_cases

COMMANDS = {" ".join(words): command for words, command in commands_of(app())}


def test_the_help_names_every_command_and_imports_none_of_them():
    code = """
import sys
from rheostat.flows.cli.app import main
assert not any(main(words) for words in (["--help"], ["engine", "--help"], ["train", "--help"], ["rescore", "--help"]))
heavy = {"pydantic", "numpy", "pyarrow", "prefect", "rheostat.tasks", "rheostat.models", "httpx"} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    listed = {line.split()[1] for line in shown.stdout.splitlines() if line.startswith("│ ") and line[2] != " "}
    assert {word for name in COMMANDS for word in name.split()} <= listed


def test_the_installed_command_shows_its_help():
    shown = subprocess.run([RHEOSTAT, "--help"], capture_output=True, text=True, check=True)
    assert "Usage: rheostat COMMAND" in shown.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert COMMANDS[name].help.splitlines()[0] in shown
    assert f"example: rheostat {name} " in shown


def test_the_help_shows_defaults_and_choices(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["rollouts", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "[choices: position, reward, length] [default: position]" in shown
    assert "[default: 10]" in shown
    assert "[default: the last]" in shown
    assert "None" not in shown and "False" not in shown


def test_the_table_of_commands_in_the_readme_is_up_to_date():
    assert README.read_text() == replace_table(README.read_text()), "run `make docs`"


def test_the_command_reference_is_up_to_date():
    assert PAGE.read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_run_by_a_test(name):
    words = name.split()
    assert words in [given[: len(words)] for given in _given()]


@functools.cache
def _given() -> list[list[str]]:
    """Return the leading words of every list and call in the tests, and the command lines that tables refuse.

    If a list or call names the program first, the words are those after the program.
    """
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    refused = [list(case.values[0].command) for case in read_cases()]
    return [
        words for path in paths for node in ast.walk(ast.parse(path.read_text())) if (words := _words(node))
    ] + refused


def _words(node: ast.AST) -> list[str]:
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
    if items and isinstance(items[0], ast.Name):  # RHEOSTAT, or the job that is asked
        items = items[1:]
    texts = [item.value if isinstance(item, ast.Constant) else None for item in items]
    return list(itertools.takewhile(lambda text: isinstance(text, str), texts))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (
            "rheostat re",
            {"retrain", "registry", "refuse", "reward-model", "rescore", "recredit", "report", "retriever", "rewards"},
        ),
        ("rheostat engine ", {"install", "check", "serve", "serve-policy"}),
        ("rheostat engine install ", {"vllm", "verifiers", "lm_eval", "inspect"}),
        ("rheostat engine serve ", {"vllm"}),
        ("rheostat train job.toml --dr", {"--dry-run"}),
        ("rheostat rollouts tiny --sort ", {"position", "reward", "length"}),
        ("rheostat train j", {"job.toml"}),
        ("rheostat show ", {"tiny", "trial"}),
        ("rheostat show --store elsewhere/runs ", {"far"}),
    ],
)
def test_bash_completes_commands_options_choices_files_and_runs(typed, offered, tmp_path, completion):
    (tmp_path / "job.toml").touch()
    for store, run in (("runs", "tiny"), ("runs", "trial"), ("elsewhere/runs", "far")):
        create_run(str(tmp_path / store), run, {})
    *words, last = typed.split(" ")
    line = " ".join(shlex.quote(word) for word in [*words, last])
    script = (
        f"PATH={shlex.quote(str(Path(RHEOSTAT).parent))}:$PATH; source {shlex.quote(str(completion))}\n"
        f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _rheostat; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    """Script of the shell completion."""
    done = subprocess.run([RHEOSTAT, "completion", "bash"], capture_output=True, text=True, check=True)
    path = tmp_path_factory.mktemp("shell") / "completion.bash"
    path.write_text(done.stdout)
    return path


def test_an_unreachable_prefect_server_is_one_error_with_the_next_step():
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(ApiFailed, match=r"127\.0\.0\.1:9/api.* Start that server, or unset PREFECT_API_URL"),
        prefect_api(),
    ):
        pass


@pytest.mark.parametrize("name", COMMANDS)
def test_options_with_whole_numbers_do_not_round(name):
    arguments = COMMANDS[name].assemble_argument_collection()
    for argument in arguments:
        if int in (argument.hint, *get_args(argument.hint)):
            assert argument.parameter.converter in (parse_port, parse_port_or_free, parse_whole_number), argument.name
