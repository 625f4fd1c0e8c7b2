"""A whole run whose unfinished episodes continue in the next iteration, and the commands that read the run."""

from itertools import chain

import pyarrow as pa
import pytest

import rheostat.tasks.verification.samples as verification
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.stored_runs import open_tiny

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
FAMILY = "partial episodes"

THREADS = ("pools.cluster=threads",)


def read_episodes(job, number):
    """Return the finished and the unfinished episodes of an iteration."""
    run = open_tiny(job)
    manifests = [each for each in run.manifests(f"it-{number:04d}") if "/rollout" in each.key]
    shards = ([each.shards[0] for each in manifests], [shard for each in manifests for shard in each.shards[1:]])
    return tuple([row for ref in part for row in read_shard(run.store, ref).to_pylist()] for part in shards)


def versions_of(row):
    return [each["policy_version"] for each in row["segments"] if each["policy_version"] >= 0]


def test_samples_have_tokens_of_several_policy_versions(whole):
    assert verify_run(str(whole.store), "tiny") == []
    assert checker.problems_of(whole.run) == []
    _, cut = read_episodes(whole, 1)
    ended, _ = read_episodes(whole, 2)
    turned = [row for row in ended if len({*versions_of(row)}) == 2]
    assert any(len(versions_of(row)) > len(row["turns"]) for row in turned), "a turn of two versions"
    assert any(len(versions_of(row)) == len(row["turns"]) for row in turned), "two versions, a turn each"
    assert any(row["turns"] and row["finish_reason"] == "cut" for row in cut)
    for row in ended:
        roles = [message["role"] for message in row["messages"]]
        assert roles == [("user", "assistant")[place % 2] for place in range(len(roles))]
        assert roles.count("assistant") == len(row["turns"])
    run = open_tiny(whole)
    samples = read_shard(run.store, run.require("it-0002/credit").shards[0]).to_pylist()
    assert {1, 0, -1} <= {*chain.from_iterable(row["staleness"] for row in samples)}


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: [*parts[:-1], parts[-1] | {"tokens": parts[-1]["tokens"] + 1}],
        lambda parts: [{"policy_version": 1, "tokens": 1}, parts[0] | {"tokens": parts[0]["tokens"] - 1}, *parts[1:]],
        lambda parts: [part | {"policy_version": 0} for part in parts],
        lambda parts: [parts[0], *parts],
    ],
)
def test_verify_finds_segments_that_do_not_match_the_turns(whole, monkeypatch, change):
    iteration, read = Iteration(open_tiny(whole), 2), verification.read_shard
    assert [*verification.check_rollouts(iteration)] == []

    def changed(store, ref, columns):
        table = read(store, ref, columns=columns)
        if "turns" not in columns or "messages" in columns or not table.num_rows:
            return table
        found = [change(parts) if len(parts) > 2 else parts for parts in table["segments"].to_pylist()]
        place = table.column_names.index("segments")
        return table.set_column(place, table.field(place), pa.array(found, table.schema.field(place).type))

    monkeypatch.setattr(verification, "read_shard", changed)
    found = [*verification.check_rollouts(iteration)]
    assert found
    assert all("do not match its tokens" in line for line in found)


def test_commands_accept_a_run_of_partial_episodes(job):
    replayed = job.command("verify", "--environment", "--episodes", "12")
    assert (replayed.code, "12 episodes were replayed: new environments responded as" in replayed.output) == (0, True)
    assert "turn 2: " in job.command("rollouts").output
    again = job.command("rescore", "--rewards", "rewards=[{kind='regex', pattern='1'}]", "--as", "ones", *THREADS)
    assert again.code == 0, again.output
    credit = job.command("recredit", "--algorithm", "reinforce_pp", "--as", "ones", "--scores", "ones", *THREADS)
    assert credit.code == 0, credit.output
    assert open_tiny(job).require("recredit/ones/it-0002/seal").metrics["coinciding"] > 0
    assert verify_run(str(job.store), "tiny") == []


def test_forgetting_a_prompt_empties_both_parts_of_its_episodes(job, tmp_path):
    _, cut = read_episodes(job, 1)
    forgotten = next(row["prompt_id"] for row in cut if row["turns"])
    (tmp_path / "ids").write_text(forgotten)
    ended = job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete")
    assert ended.code == 0, ended.output
    found = [
        row
        for part in (*read_episodes(job, 1), *read_episodes(job, 2))
        for row in part
        if row["prompt_id"] == forgotten
    ]
    assert {row["finish_reason"] == "cut" for row in found} == {True, False}
    assert not any(chain.from_iterable(row["completion_tokens"] for row in found))
    assert not any(row["completion"] or row["prompt"] for row in found)
    assert not any(message["content"] for row in found for message in row["messages"] or ())
    assert verify_run(str(job.store), "tiny") == []
