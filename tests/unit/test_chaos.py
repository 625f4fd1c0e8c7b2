"""The command `make chaos`: its kinds of runs, and what it prints about a schedule that fails."""

import tomllib

import pytest

from tests.support import chaos_command
from tests.support.chaos import schedule_of
from tests.support.chaos_command import judge, kinds, main, parse_arguments
from tests.support.chaos_deployed import VICTIMS, schedule_victims
from tests.support.chaos_families import (
    SHARES,
    UPDATE_MOMENTS,
    run_chain,
    schedule_server,
    schedule_sweep,
    schedule_writes,
)
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
        "deployed",
    ):
        assert f"\n{name} " in listed


def test_the_nightly_suite_kills_only_kinds_that_exist():
    command = tomllib.loads((ROOT / ".ci/suites.toml").read_text())["part"]["chaos-families"]
    named = command.split("--family ")[1:]
    assert len(named) >= 10 and {each.strip(" '\"") for each in named} <= kinds().keys()
    assert command.startswith("make chaos SEEDS={seed}+4 "), "four schedules for each kind"


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


@pytest.mark.parametrize(
    "schedule",
    [
        lambda seed: schedule_of(seed, 300, shares=SHARES),
        lambda seed: schedule_writes(seed, 300),
        lambda seed: schedule_sweep(seed, 300),
        schedule_server,
        schedule_victims,
    ],
    ids=["families", "soup and s3", "sweep", "prefect server", "deployed"],
)
def test_four_consecutive_seeds_are_four_schedules(schedule):
    for seed in range(200):
        assert len({str(schedule(each)) for each in range(seed, seed + 4)}) == 4


def test_consecutive_seeds_kill_at_all_parts_of_a_run_and_every_victim():
    for seed in range(40):
        seeds = range(seed, seed + 4)
        assert {(schedule_writes(each, 300)[0][1] - 1) * 4 // 300 for each in seeds} == {0, 1, 2, 3}
        assert {(kill.files - 1) * 4 // 300 for each in seeds for kill in schedule_sweep(each, 300)} == {0, 1, 2, 3}
        assert {schedule_sweep(each, 300)[0].of_run for each in seeds} == {True, False}
        assert {schedule_server(each)[0] for each in range(seed, seed + 6)} == {*UPDATE_MOMENTS}
        assert {schedule_victims(each)[0][0] for each in range(seed, seed + 6)} == {*VICTIMS}
