"""The command `make chaos`: its kinds of runs, and what it prints about a schedule that fails."""

import tomllib

import pytest

from tests.support import chaos_command
from tests.support.chaos_command import judge, kinds, main, parse_arguments
from tests.support.chaos_families import run_chain
from tests.support.jobs import ROOT


def test_the_list_names_every_kind_of_run(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name in (
        "vision",
        "diffusion",
        "dialogues",
        "tools",
        "stale rollouts",
        "soup",
        "sweep",
        "s3",
        "prefect server",
    ):
        assert f"\n{name} " in listed


def test_the_nightly_suite_kills_only_kinds_that_exist():
    command = tomllib.loads((ROOT / ".ci/suites.toml").read_text())["part"]["chaos-families"]
    named = command.split("--family ")[1:]
    assert len(named) >= 9 and {each.strip(" '\"") for each in named} <= kinds().keys()


@pytest.mark.parametrize("words", [["--family", "nothing"], ["--family", "vision", "--on", "ray"]])
def test_unknown_kinds_and_options_of_the_text_job_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert "--family" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ("", "make chaos SEEDS=7"),
        ("--family vision", "make chaos SEEDS=7 ARGS='--family vision'"),
        ('--family "stale rollouts"', "make chaos SEEDS=7 ARGS='--family \"stale rollouts\"'"),
    ],
)
def test_a_schedule_that_fails_is_printed_with_the_command_that_repeats_it(options, command, tmp_path, capsys):
    schedules = {"seed 6": ["a kill"], "seed 7": ["another kill"]}

    def problems_after(faults, place):
        return [] if faults == ["a kill"] else ["other manifests"]

    assert judge(schedules, tmp_path, problems_after, side_by_side=1, options=options) == 1
    *_, failed, repeat, summary = capsys.readouterr().out.splitlines()
    assert failed == "FAILED seed 7: another kill: other manifests"
    assert repeat == f"repeat with: {command}"
    assert summary.startswith("1 of 2 schedules")


@pytest.mark.parametrize(
    ("codes", "problems"),
    [
        ([-9, 0], []),
        ([0], []),
        ([-9, 1], ["start 2 ended with 1: said"]),
        ([1], ["start 1 ended with 1: said"]),
        ([-9, -9], ["start 2 ended with -9: said"]),
    ],
)
def test_a_command_is_run_again_until_it_succeeds_and_only_a_documented_end_may_come_before(codes, problems, tmp_path):
    codes = iter(codes)
    found = run_chain(
        ["a kill"], lambda fault: (next(codes), "said"), place=tmp_path, ends=lambda _, code, __: code == -9
    )
    assert found == problems


def test_seeds_are_a_range_or_a_start_with_a_number():
    assert [list(chaos_command.read_seeds(text)) for text in ("3", "3..5", "3+2")] == [[3], [3, 4, 5], [3, 4]]
