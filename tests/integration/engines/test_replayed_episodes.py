"""Stored episodes that are played again: environments that follow from problem, seed and turns, and those that lie."""

import re
from dataclasses import replace

import pytest

from infra.store.shards import read_shard
from infra.store.storage import open_store
from models.config.engines import SamplingConfig
from models.config.environments import TargetEnvironment
from models.environments.replay import replay
from models.records.replays import ReplayWork
from models.workers.rollout import RolloutWorker
from tests.support.rollout_workers import ENGINE, example

STOPS = SamplingConfig(max_new_tokens=40, stop=("a", "e", "o", " ", "1", "0"))
"""A random policy seldom ends a turn of itself."""


def environment(name: str, **options: object) -> TargetEnvironment:
    more = {"prompts": "text", "parser": "none", "turn_tokens": 12, "processes": 2}
    more["step_seconds"] = 1 if options.get("how") == "hang" else 20
    return TargetEnvironment(target=f"tests.support.games:{name}", options=options, **more)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Play one shard of four episodes for each of these prompts, and say how some of them are played again."""
    home = tmp_path_factory.mktemp("episodes")
    store = open_store(f"{home}/run")
    shown = replace(example(store, home / "policy"), sampling=STOPS)

    def play(settings: TargetEnvironment, *, prompts: tuple[int, ...] = shown.rows, rows: range = range(20)):
        work = replace(shown, rows=prompts)
        worker = RolloutWorker(str(home), "run", ENGINE, 1, environment=settings)
        try:
            [shard] = worker.generate(work).shards
        finally:
            worker.close()
        again = ReplayWork(
            run_uri=store.uri,
            environment=settings,
            sampling=STOPS,
            policy=home / "policy",
            prompts=work.prompts,
            episodes=tuple((shard, row) for row in rows),
        )
        return again, read_shard(store, shard).to_pylist()

    return play


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
def test_what_follows_from_problem_seed_and_turns_is_answered_again_failures_too(played, name, options):
    again, rows = played(environment(name, **options), prompts=(7, 2), rows=range(8))
    kind = "error" if name in ("Bad", "Unready") else "observation"
    assert any(turn[kind] for row in rows for turn in row["turns"])
    assert replay(again) == []
    assert replay(replace(again, episodes=again.episodes[::-3])) == []


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
def test_what_follows_from_anything_else_is_found_and_named(played, name, options, words):
    again, rows = played(environment(name, **options), rows=range(3, 19))
    [shard] = {shard for shard, _ in again.episodes}
    found = replay(again)
    assert len({each.row for each in found}) > 3
    for each in found:
        assert (each.shard, each.row in range(3, 19)) == (shard.key, True)
        assert 0 <= each.turn <= len(rows[each.row]["turns"])
        assert each.expected != each.found
        assert max(len(each.expected), len(each.found)) <= 62
    assert any(re.search(words, f"{each.expected} {each.found}") for each in found)


def test_a_difference_tells_what_the_shard_holds_and_what_came(played):
    again, rows = played(environment("Echo", reward=1.0))
    of = next(row for row, each in enumerate(rows) if len(each["turns"]) == 3)
    paid = environment("Echo", reward=2.0)
    found = replay(replace(again, environment=paid, episodes=((again.episodes[of]),)))
    assert [(each.row, each.turn) for each in found] == [(of, 1), (of, 2), (of, 3)]
    place = f"{again.episodes[of][0].key}: row {of}, turn 3"
    assert found[2].line() == f"{place}: expected reward 3, the end (stop), found reward 6, the end (stop)"
