"""Episodes that are cut, within a turn or between two turns, and continue in a later iteration."""

import numpy as np
import pytest

from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.models.config.rollout import PartialRollout
from rheostat.models.records.versions import Outcome
from tests.support.episodes import Episodes, forward_logprobs, index_rows, require_equal_rows, target_environment
from tests.support.rollout_workers import publish

PARTIAL = PartialRollout(tokens=7, max_staleness=1)


def play_iterations(
    episodes: Episodes,
    settings: object,
    *,
    partial: PartialRollout = PARTIAL,
    iterations: int = 2,
    **changes: object,
) -> list[Outcome]:
    """Play one iteration, then those that continue its episodes, each in new processes and with a new version.

    The changes apply to the iterations that continue.
    """
    work = episodes.work
    outcomes = [episodes.play(settings, partial=partial)]
    for number in range(1, iterations):
        policy = type(work.policy)(version=number, weights=work.policy.weights)
        continued = {"iteration": work.iteration + number, "rows": (), "continued": outcomes[-1].shards[1]}
        outcomes.append(episodes.play(settings, partial=partial, **({"policy": policy} | continued | changes)))
    return outcomes


def count_written(row: dict[str, object]) -> dict[int, int]:
    """Return the number of completion tokens by the version of the policy that generated them."""
    counts: dict[int, int] = {}
    for segment in row["segments"]:
        if (version := segment["policy_version"]) >= 0:
            counts[version] = counts.get(version, 0) + segment["tokens"]
    return counts


def first_shards(outcomes: list[Outcome]) -> list[ShardRef]:
    return [outcome.shards[0] for outcome in outcomes]


def has_open_turn(row: dict[str, object]) -> bool:
    ended = sum(turn["tokens"] + turn["observation"] for turn in row["turns"] or ())
    return len(row["completion_tokens"]) > ended


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "settings",
    [
        target_environment("Knows", batches=2),
        target_environment("Bad", options={"how": "raise"}),
        target_environment("Opens", options={"reward": 1.5}, pace="free"),
    ],
)
def test_an_episode_that_continues_ends_like_one_that_was_never_cut(episodes, settings):
    whole = index_rows(episodes.play_rows(settings))
    first, second = play_iterations(episodes, settings)
    begun = index_rows(episodes.read_rows(*first.shards))
    assert len(second.shards) == 1
    pieces = index_rows(episodes.read_rows(first.shards[0], second.shards[0]))
    assert pieces.keys() == whole.keys()
    require_equal_rows([pieces[name] for name in whole], [*whole.values()], "segments")
    cut = [row for row in begun.values() if row["finish_reason"] == "cut"]
    assert any(row["turns"] and has_open_turn(row) for row in cut), "one is cut in its second turn"
    assert any(row["turns"] and not has_open_turn(row) for row in cut), "one is cut between turns"
    assert all(sum(count_written(row).values()) == 7 for row in cut)
    for name, row in pieces.items():
        sampled = sum(turn["tokens"] for turn in row["turns"])
        was_cut = begun[name]["finish_reason"] == "cut"
        assert count_written(row) == ({0: 7, 1: sampled - 7} if was_cut and sampled > 7 else {0: sampled})


def test_recorded_log_probs_are_those_of_the_policy_that_generated_each_token(episodes):
    other = publish(episodes.store, episodes.home / "other", seed=1)
    first, second = play_iterations(episodes, target_environment(), policy=other)
    before = index_rows(episodes.read_rows(first.shards[1]))
    table = read_shard(episodes.store, second.shards[0])
    by_policy = zip(*(forward_logprobs(episodes.home / name, table) for name in ("policy", "other")), strict=True)
    num_mixed = 0
    for row, computed in zip(table.to_pylist(), by_policy, strict=True):
        old = before[row["prompt_row"], row["sample"]]
        kept = len(old["completion_tokens"])
        assert (row["completion_tokens"][:kept], row["logprobs"][:kept]) == (old["completion_tokens"], old["logprobs"])
        assert (row["messages"] or [])[: len(old["messages"] or [])] == (old["messages"] or [])
        if old["finish_reason"] != "cut":
            assert row == old
        generated = [each for each in row["segments"] if each["policy_version"] >= 0]
        versions = np.repeat(*zip(*((each["policy_version"], each["tokens"]) for each in generated), strict=True))
        for version, (logprobs, recorded) in enumerate(computed):
            np.testing.assert_allclose(logprobs[versions == version], recorded[versions == version], atol=2e-5)
        num_mixed += len({*versions}) == 2
    assert num_mixed > 5


@pytest.mark.thorough
def test_an_episode_is_cut_again_until_it_reaches_the_largest_staleness(episodes):
    whole = index_rows(episodes.play_rows(target_environment()))
    partial = PartialRollout(tokens=4, max_staleness=2)
    outcomes = play_iterations(episodes, target_environment(), partial=partial, iterations=3)
    assert len(outcomes[-1].shards) == 1
    pieces = index_rows(episodes.read_rows(*first_shards(outcomes)))
    assert {name: row["completion_tokens"] for name, row in pieces.items()} == {
        name: row["completion_tokens"] for name, row in whole.items()
    }
    stale = [row for row in pieces.values() if len(count_written(row)) == 3]
    assert any(segment["policy_version"] == -1 for row in stale for segment in row["segments"][:-1])
    assert all([count_written(row)[version] for version in (0, 1)] == [4, 4] for row in stale)
    for number, outcome in enumerate(outcomes):
        rows = episodes.read_rows(*outcome.shards)
        assert outcome.metrics["tokens"] == sum(count_written(row).get(number, 0) for row in rows)


@pytest.mark.thorough
def test_pieces_have_equal_digests_with_one_and_four_processes(episodes):
    one, four = (
        [outcome.shards for outcome in play_iterations(episodes, target_environment(processes=processes))]
        for processes in (1, 4)
    )
    assert one == four
