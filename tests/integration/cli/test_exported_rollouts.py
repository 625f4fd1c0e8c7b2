"""Exported rollouts contain the advantages and the groups that the update was trained on."""

import json
import math
import shutil
from itertools import groupby
from statistics import fmean, pstdev

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.algorithms import Grpo
from rheostat.models.credit.inputs import TermColumns
from rheostat.models.credit.selection import group_columns, informative_by
from rheostat.models.records.schemas import ROLLOUT_SCHEMA


@pytest.fixture(scope="module")
def exported(reference, tmp_path_factory):
    """Copy of the undisturbed run, and the rows of its exported iterations."""
    store = tmp_path_factory.mktemp("exported") / "store"
    shutil.copytree(reference.store, store)
    assert main(["export", "tiny", "--store", str(store)]) == 0
    files = [store / f"tiny/export/it-000{number}.parquet" for number in (1, 2, 3)]
    return open_run(str(store), "tiny"), [pq.read_table(file).to_pylist() for file in files]


def test_exported_advantages_equal_those_of_the_samples_and_follow_from_the_rewards(exported):
    run, iterations = exported
    trained = 0
    for number, rows in enumerate(iterations, start=1):
        samples = read_shard(run.store, run.require(f"it-{number:04d}/credit").shards[0]).to_pylist()
        learnt = {(sample["prompt_row"], sample["sample"]): sample["advantages"] for sample in samples}
        told = {(row["prompt_row"], row["sample"]): row["advantages"] for row in rows}
        assert {place: values for place, values in told.items() if values is not None} == learnt
        for _, members in groupby(rows, key=lambda row: row["prompt_row"]):
            group = list(members)
            rewards = [row["reward"] for row in group]
            mean, std = fmean(rewards), pstdev(rewards)
            for row in group:
                assert (row["group_size"], row["group_informative"]) == (4, std > 0)
                assert (row["group_reward_mean"], row["group_reward_std"]) == pytest.approx((mean, std))
                expected = [(row["reward"] - mean) / (std + 1e-6)] * len(row["completion_tokens"]) if std else None
                assert row["advantages"] == (expected and pytest.approx(expected, rel=1e-5))
            trained += len(group) if std else 0
    assert 0 < trained < sum(map(len, iterations)), "groups that differ, and groups that do not"


def test_a_query_counts_the_groups_without_advantages(exported, capsys):
    run, iterations = exported
    sql = "select count(distinct prompt_row) as groups from rollouts where iteration = 2 and not group_informative"
    assert (
        main(["query", sql, "tiny", "--json", "--store", run.store.uri.removeprefix("file://")[: -len("/tiny")]]) == 0
    )
    dull = {row["prompt_row"] for row in iterations[1] if row["advantages"] is None}
    assert json.loads(capsys.readouterr().out) == [{"groups": len(dull)}]


def tables(rewards, logprobs, rows=(0, 0, 0, 1, 1, 2)):
    """Completions of one token each, with a single reward term."""
    values = {name: [None] * len(rows) for name in ROLLOUT_SCHEMA.names}
    values |= {"prompt_row": rows, "sample": range(len(rows)), "completion_tokens": [[1]] * len(rows)}
    values |= {"logprobs": [[each] for each in logprobs]}
    values |= {"segments": [[{"policy_version": 0, "tokens": 1}]] * len(rows)}
    rollouts = pa.table({name: pa.array([*values[name]], ROLLOUT_SCHEMA.field(name).type) for name in values})
    scores = {"prompt_row": rows, "reward": rewards, "reward_even": rewards}
    return rollouts, pa.table({name: pa.array([*column]) for name, column in scores.items()})


def test_a_completion_that_cannot_be_trained_on_does_not_count_in_its_group():
    rollouts, scores = tables([1.0, 0.0, 5.0, None, 2.0, None], [-1.0, -1.0, math.nan, -1.0, -1.0, -1.0])
    terms = (TermColumns("even"),)

    def informative(scored):
        return informative_by(scored, Grpo(), "even")

    columns = group_columns(rollouts, scores, [], terms=terms, informative=informative)
    found = {name: column.to_pylist() for name, column in columns.items()}
    assert found["group_size"] == [2, 2, 2, 1, 1, 0]
    assert found["group_reward_mean"] == [0.5, 0.5, 0.5, 2.0, 2.0, None]
    assert found["group_reward_std"] == [0.5, 0.5, 0.5, 0.0, 0.0, None]
    assert found["group_informative"] == [True, True, True, False, False, False]
    assert group_columns(rollouts, scores, [], terms=terms, informative=None)["group_informative"].null_count == 6
    estimates = pa.table({
        "prompt_row": rollouts["prompt_row"], "sample": rollouts["sample"],
        **{name: pa.nulls(6, pa.list_(pa.float32())) for name in ("policy", "reference", "teacher")},
        "values": [[np.inf], [0.0], [0.0], [0.0], [0.0], [0.0]],
    })  # fmt: skip
    judged = group_columns(rollouts, scores, [estimates], terms=terms, informative=None)
    assert judged["group_size"].to_pylist() == [1, 1, 1, 1, 1, 0]
