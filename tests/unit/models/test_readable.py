"""Completions as people read them: excerpts for a report."""

from pathlib import Path

import pyarrow as pa
import pytest

from infra.store.shards import write_shard
from infra.store.storage import open_store
from models.config.algorithms import Grpo
from models.config.reward_terms import NumericReward
from models.config.rewards import ScoringConfig
from models.records.schemas import score_schema
from models.records.work import ExcerptWork, ScoredShard
from models.workers.scoring import ScoringWorker
from tests.support.rollout_shards import rollout, write_rollouts

LONG = "a" * 30 + "é" * 1_000_000


@pytest.fixture
def shards(tmp_path: Path) -> tuple[ScoredShard, ...]:
    """Two shards of two prompts each, two completions of each prompt, with long texts."""
    store = open_store(f"{tmp_path}/run")
    written = []
    for begin in (0, 2):
        rows = [
            rollout(row, sample, f"{row}-{sample}", prompt=LONG, answer=None if row else LONG)
            for row in (begin, begin + 1)
            for sample in (0, 1)
        ]
        keys = ("prompt_row", "sample")
        scores = [{**{key: row[key] for key in keys}, "reward": row["prompt_row"]} for row in rows]
        table = pa.Table.from_pylist(scores, schema=score_schema(("numeric",)))
        rewards = write_shard(store, table, kind="scores", metadata={})
        written.append(ScoredShard(rollouts=write_rollouts(store, *rows), scores=rewards))
    return tuple(written)


def excerpts(tmp_path: Path, work: ExcerptWork):
    worker = ScoringWorker(str(tmp_path), "run", ScoringConfig(rewards=(NumericReward(),)), Grpo())
    return worker.excerpts(work).samples


def test_a_report_shows_one_completion_of_each_of_the_first_prompts_with_its_reward(tmp_path, shards):
    found = excerpts(tmp_path, ExcerptWork(iteration=7, shards=shards, prompts=3, characters=40))
    assert [(s.iteration, s.completion, s.reward, s.tokens) for s in found] == [
        (7, "0-0", 0.0, 3),
        (7, "1-0", 1.0, 3),
        (7, "2-0", 2.0, 3),
    ]


def test_a_report_shortens_long_texts_and_says_so(tmp_path, shards):
    first, second, *_ = excerpts(tmp_path, ExcerptWork(iteration=7, shards=shards, prompts=4, characters=40))
    assert first.prompt == first.answer == "a" * 30 + "é" * 10 + "…"
    assert second.answer is None
