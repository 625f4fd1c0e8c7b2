"""Excerpts of completions for a report."""

from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.store.shards import write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.reward_terms import NumericReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.schemas import score_schema
from rheostat.models.records.work import ExcerptWork, ScoredShard
from rheostat.models.workers.scoring import ScoringWorker
from tests.support.rollout_shards import rollout, write_rollouts

LONG = "a" * 30 + "é" * 1_000_000


@pytest.fixture
def shards(tmp_path: Path) -> tuple[ScoredShard, ...]:
    """Two shards of two prompts each, two completions of each prompt, with long texts."""
    store = open_store(f"{tmp_path}/run")
    scored = []
    for begin in (0, 2):
        rows = [
            rollout(row, sample, f"{row}-{sample}", prompt=LONG, answer=None if row else LONG)
            for row in (begin, begin + 1)
            for sample in (0, 1)
        ]
        scores = [{key: row[key] for key in ("prompt_row", "sample")} | {"reward": row["prompt_row"]} for row in rows]
        table = pa.Table.from_pylist(scores, schema=score_schema(("numeric",)))
        rewards = write_shard(store, table, kind="scores", metadata={})
        scored.append(ScoredShard(rollouts=write_rollouts(store, *rows), scores=rewards))
    return tuple(scored)


@pytest.fixture
def worker(tmp_path: Path) -> ScoringWorker:
    return ScoringWorker(str(tmp_path), "run", ScoringConfig(rewards=(NumericReward(),)), Grpo())


def test_a_report_has_one_completion_of_each_of_the_first_prompts_with_its_reward(worker, shards):
    found = worker.excerpts(ExcerptWork(iteration=7, shards=shards, prompts=3, characters=40)).samples
    expected = [(7, "0-0", 0.0, 3), (7, "1-0", 1.0, 3), (7, "2-0", 2.0, 3)]
    assert [(s.iteration, s.completion, s.reward, s.tokens) for s in found] == expected
    assert found[0].prompt == found[0].answer == "a" * 30 + "é" * 10 + "…"  # long texts are shortened
    assert found[1].answer is None
