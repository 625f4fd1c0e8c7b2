"""Episodes of agents that are cut and continue in a later iteration, in which their agents start again."""

import multiprocessing
import signal
from pathlib import Path

import numpy as np
import pytest

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.models.agents.stored_branches import continues, read_records
from rheostat.models.config.agents import AgentEnvironment
from rheostat.models.config.rollout import PartialRollout
from rheostat.models.records.versions import ModelVersion
from tests.support.episodes import chat_episodes, forward_logprobs, index_rows, require_equal_rows, target_environment
from tests.support.policies import write_chat_policy

PARTIAL = PartialRollout(tokens=18, max_staleness=1)
ENDED = {"stop", "length"}
"""Finish reasons of episodes whose agent has returned, by whether its last turn reached the limit of a turn."""


@pytest.fixture(scope="module")
def agents(home):
    return chat_episodes(home, max_new_tokens=2000)


def agent(name="talk", **settings):
    defaults = {"turn_tokens": 20, "parser": "hermes", "agent_seconds": 60, "open_episodes": 1}
    return AgentEnvironment(target=f"tests.support.agents:{name}", **{**defaults, **settings})


def play_again(agents, settings, outcome, *, version, partial=PARTIAL, **changes):
    """Play the iteration after `outcome`, which continues its cut episodes with a policy version."""
    policy = ModelVersion(version=version, weights=agents.work.policy.weights)
    continued = {"rows": (), "continued": outcome.shards[1], "iteration": agents.work.iteration + version}
    return agents.play(settings, **({"policy": policy, "partial": partial} | continued | changes))


def rows_of(agents, *outcomes):
    """Return the rows of several iterations by prompt row and sample, the last state of each."""
    return index_rows([row for outcome in outcomes for row in agents.read_rows(*outcome.shards)])


def by_time(row):
    return sorted(row["turns"] or (), key=lambda turn: turn["order"])


def versions_of(row):
    return {each["policy_version"] for each in row["segments"] if each["policy_version"] >= 0}


def test_an_agents_episode_that_continues_ends_like_one_that_was_never_cut(agents):
    whole = index_rows(agents.play_rows(agent()))
    first = agents.play(agent(), partial=PARTIAL)
    begun = rows_of(agents, first)
    cut = {name for name, row in begun.items() if row["finish_reason"] == "cut"}
    assert {sum(turn["tokens"] for turn in begun[name]["turns"]) for name in cut} == {18}
    assert "cut" in {by_time(begun[name])[-1]["finish_reason"] for name in cut}
    second = play_again(agents, agent(), first, version=1)
    assert len(second.shards) == 1
    assert first.metrics["tokens"] == sum(turn["tokens"] for row in begun.values() for turn in row["turns"])
    assert "dropped_tokens" not in second.metrics
    ended = rows_of(agents, first, second)
    require_equal_rows([ended[name] for name in whole], [*whole.values()], "segments", "turns")
    for name, row in ended.items():
        assert versions_of(row) == ({0, 1} if name in cut else {0})
        for place, (turn, other) in enumerate(zip(by_time(row), by_time(whole[name]), strict=True)):
            assert {**turn, "replayed": None} == {**other, "replayed": None}
            assert turn["replayed"] == (name in cut and place < len(begun[name]["turns"]))


def test_log_probs_of_a_continued_turn_are_those_of_the_policy_that_sampled_each_token(agents):
    folder = agents.home / "other"
    write_chat_policy(folder, "qwen-2.5", likely={"<|im_end|>": 0.05}, seed=1)
    other = ModelVersion(version=1, weights=publish_bundle(agents.store, folder, prefix="policies"))
    first = agents.play(agent(), partial=PARTIAL)
    second = play_again(agents, agent(), first, version=1, policy=other)
    table = read_shard(agents.store, second.shards[0])
    by_policy = zip(*(forward_logprobs(each, table) for each in (agents.policy, folder)), strict=True)
    num_mixed = 0
    for row, computed in zip(table.to_pylist(), by_policy, strict=True):
        sampled = [each for each in row["segments"] if each["policy_version"] >= 0]
        versions = np.repeat(*zip(*((each["policy_version"], each["tokens"]) for each in sampled), strict=True))
        num_mixed += len({*versions}) == 2
        for version, (logprobs, recorded) in enumerate(computed):
            np.testing.assert_allclose(logprobs[versions == version], recorded[versions == version], atol=2e-4)
    assert num_mixed > 1


def test_a_sleeping_agent_is_cut_by_time_and_continues_when_it_starts_again(agents, tmp_path):
    """The agents sleep until a file exists, which is created after the first iteration has ended."""
    settings = agent("wait_for_file", options={"path": str(tmp_path / "file")}, open_episodes=4, agent_seconds=600)
    partial = PartialRollout(tokens=1000, max_staleness=1, iteration_seconds=0.2)
    first = agents.play(settings, partial=partial)
    cut = rows_of(agents, first)
    assert {row["finish_reason"] for row in cut.values()} == {"cut"}
    begun = [name for name, row in cut.items() if row["segments"]]
    assert begun, "an agent that has started is recorded, even without a request"
    (tmp_path / "file").touch()
    ended = rows_of(agents, first, play_again(agents, settings, first, version=1, partial=partial))
    assert {ended[name]["finish_reason"] for name in begun} <= ENDED
    for name in begun:
        assert [turn["replayed"] for turn in by_time(ended[name])] == [bool(cut[name]["turns"]), False]


@pytest.mark.thorough
def test_an_agent_without_any_request_ends_after_the_largest_staleness(agents):
    settings = agent("late", options={"seconds": 3}, open_episodes=4)
    partial = PartialRollout(tokens=1000, max_staleness=2, iteration_seconds=0.5)
    outcomes = [agents.play(settings, partial=partial)]
    for version in (1, 2):
        assert all(row["finish_reason"] == "cut" for row in rows_of(agents, outcomes[-1]).values())
        outcomes.append(play_again(agents, settings, outcomes[-1], version=version, partial=partial))
    assert {row["segments"][0]["policy_version"] for row in rows_of(agents, outcomes[1]).values()} == {0}
    assert len(outcomes[2].shards) == 1
    assert {row["finish_reason"] for row in rows_of(agents, outcomes[2]).values()} <= ENDED


def test_turns_for_which_a_restarted_agent_sends_other_requests_are_sampled_again(agents, tmp_path, caplog):
    settings = agent("vary", options={"marks": str(tmp_path)})
    first = agents.play(settings, partial=PARTIAL)
    second = play_again(agents, settings, first, version=1)
    assert second.metrics["dropped_tokens"] > 0
    assert "were not requested again by the restarted agent" in caplog.text
    tables = [read_shard(agents.store, shard) for shard in (first.shards[1], second.shards[0])]
    for row, earlier, record in zip(tables[1].to_pylist(), *map(read_records, tables), strict=True):
        if earlier.turns()[-1].number > 0:
            assert [turn["replayed"] for turn in by_time(row)] == [True, False, False]
            assert [turn.segments[0].policy_version for turn in record.turns()] == [0, 1, 1]
        assert continues(record, earlier, version=1)


def test_agents_with_concurrent_requests_continue(agents):
    settings = agent("talk_async", open_episodes=4)
    first = agents.play(settings, partial=PARTIAL)
    second = play_again(agents, settings, first, version=1)
    rows = rows_of(agents, first, second).values()
    assert [len(row["turns"]) for row in rows] == [3] * 4
    assert {row["finish_reason"] for row in rows} <= ENDED
    if len(first.shards) > 1:
        assert "dropped_tokens" not in second.metrics


def test_an_agent_in_a_sandbox_continues(agents):
    settings = agent(sandbox="bubblewrap")
    changes = {"rows": (2,), "group_size": 1}
    first = agents.play(settings, partial=PARTIAL, **changes)
    second = play_again(agents, settings, first, version=1)
    [row] = rows_of(agents, second).values()
    assert (by_time(row)[0]["replayed"], versions_of(row)) == (True, {0, 1})


@pytest.mark.thorough
def test_a_worker_that_is_killed_while_episodes_continue_loses_no_turn(agents, tmp_path):
    first = agents.play(agent("kill_later", options={"marks": str(tmp_path)}), partial=PARTIAL)
    (tmp_path / "armed").touch()
    settings = agent("kill_later", options={"marks": str(tmp_path)})
    arguments = (agents, settings, first)
    worker = multiprocessing.get_context("spawn").Process(target=play_again, args=arguments, kwargs={"version": 1})
    worker.start()
    worker.join(300)
    assert worker.exitcode == -signal.SIGKILL
    assert Path(tmp_path, "killed").exists()
    second = play_again(agents, settings, first, version=1)
    rows = rows_of(agents, second)
    assert {tuple(turn["replayed"] for turn in by_time(row)) for row in rows.values()} >= {(True, True, True)}
    whole = index_rows(agents.play_rows(agent()))
    assert {name: row["completion_tokens"] for name, row in rows.items()} == {
        name: row["completion_tokens"] for name, row in whole.items()
    }
    assert not agents.store.entries("episodes/")


@pytest.mark.parametrize("pace", ["rounds", "free"])
def test_time_cuts_episodes_of_stepped_environments_between_turns(episodes, pace):
    settings = target_environment("Knows", pace=pace)
    whole = index_rows(episodes.play_rows(settings))
    partial = PartialRollout(tokens=39, max_staleness=1, iteration_seconds=1e-6)
    first = episodes.play(settings, partial=partial)
    cut = [row for row in rows_of(episodes, first).values() if row["finish_reason"] == "cut"]
    assert cut
    assert {len(row["turns"]) for row in cut} == {1}
    pieces = rows_of(episodes, first, play_again(episodes, settings, first, version=1, partial=partial))
    require_equal_rows([pieces[name] for name in whole], [*whole.values()], "segments")
