"""The replay of stored episodes: it finds environments whose answers do not follow from problem, seed and turns."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from rheostat.models.config.environments import TargetEnvironment
from rheostat.models.environments.replay import replay
from rheostat.models.records.replays import ReplayWork
from tests.support.episodes import STOPS, Episodes, target_environment

Played = tuple[ReplayWork, list[dict[str, object]]]
Play = Callable[..., Played]


@pytest.fixture(scope="module")
def play(episodes: Episodes) -> Play:
    """Function that plays a shard of four episodes for each prompt and returns the work that replays some of them."""

    def play_shard(
        settings: TargetEnvironment, *, prompts: tuple[int, ...] = episodes.work.rows, rows: range = range(20)
    ) -> Played:
        [shard] = episodes.play(settings, rows=prompts).shards
        work = ReplayWork(
            run_uri=episodes.store.uri,
            environment=settings,
            sampling=STOPS,
            policy=episodes.policy,
            prompts=episodes.work.prompts,
            episodes=tuple((shard, row) for row in rows),
        )
        return work, episodes.read_rows(shard)

    return play_shard


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Echo", {"reward": 1.5}),
        ("Opens", {}),
        ("Knows", {}),
        ("Bad", {"how": "raise"}),
        ("Bad", {"how": "exit"}),
        ("Bad", {"how": "hang"}),
        ("Unready", {}),
    ],
)
def test_answers_and_failures_that_follow_from_problem_seed_and_turns_repeat(play, name, options):
    seconds, prompts, rows = (1, (7,), range(2)) if options.get("how") == "hang" else (20, (7, 2), range(8))
    work, rows = play(target_environment(name, options=options, step_seconds=seconds), prompts=prompts, rows=rows)
    kind = "error" if name in ("Bad", "Unready") else "observation"
    assert any(turn[kind] for row in rows for turn in row["turns"])
    assert replay(work) == []
    assert replay(replace(work, episodes=work.episodes[::-3])) == []


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Dice", {}, r"'\["),
        ("Shares", {}, r"'\["),
        ("Rolls", {"what": "pays"}, "reward"),
        ("Rolls", {"what": "ends"}, r"the end \(stop\)"),
        ("RollsFirst", {}, "'begin"),
    ],
)
def test_answers_that_depend_on_anything_else_are_found_and_named(play, name, options, words):
    work, rows = play(target_environment(name, options=options), rows=range(3, 19))
    [shard] = {shard for shard, _ in work.episodes}
    differences = replay(work)
    assert len({each.row for each in differences}) > 3
    for each in differences:
        assert (each.shard, each.row in range(3, 19)) == (shard.key, True)
        assert 0 <= each.turn <= len(rows[each.row]["turns"])
        assert each.expected != each.found
        assert max(len(each.expected), len(each.found)) <= 62
    assert any(re.search(words, f"{each.expected} {each.found}") for each in differences)


def test_a_difference_names_the_value_in_the_shard_and_the_value_of_the_replay(play):
    work, rows = play(target_environment(options={"reward": 1.0}))
    row = next(row for row, each in enumerate(rows) if len(each["turns"]) == 3)
    other = target_environment(options={"reward": 2.0})
    differences = replay(replace(work, environment=other, episodes=(work.episodes[row],)))
    assert [(each.row, each.turn) for each in differences] == [(row, 1), (row, 2), (row, 3)]
    line = differences[2].line()
    assert line.startswith(f"{work.episodes[row][0].key}: row {row}, turn 3")
    assert "reward 3, the end (stop)" in line and "reward 6, the end (stop)" in line
