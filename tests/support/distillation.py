"""Work units for distillation: random completions with rewards, their estimates, and the credit that follows."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.reward_terms import NumericReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.teachers import Distillation, TeacherDirectory
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import score_schema
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import CreditWork, EstimateWork, ScoredShard
from rheostat.models.workers.scoring import ScoringWorker
from tests.support.rollout_shards import rollout, write_rollouts

HELD = Distillation(teacher=TeacherDirectory(path=Path("elsewhere")))
SCORING = ScoringConfig(rewards=(NumericReward(weight=1),), max_missing=1.0)


def scored_shard(uri: str, *, seed: int, rewards: tuple[float, ...] = (1.0, 0.0, 0.0), prompts: int = 3) -> ScoredShard:
    """Write random completions of random lengths, with the passed rewards in every group."""
    store, rng, terms = open_store(f"{uri}/run"), np.random.default_rng(seed), SCORING.terms
    rollouts, scores = [], []
    for prompt in range(prompts * seed, prompts * (seed + 1)):
        for sample, reward in enumerate(rewards):
            length = int(rng.integers(1, 20))
            columns = {
                "prompt_tokens": rng.integers(2, 300, int(rng.integers(3, 12))).tolist(),
                "completion_tokens": rng.integers(2, 300, length).tolist(),
                "logprobs": rng.normal(-5, 1, length).tolist(),
                "segments": [{"policy_version": 0, "tokens": length}],
            }
            rollouts.append(rollout(prompt, sample, "", **columns))
            scores.append({"prompt_row": prompt, "sample": sample, "reward": reward, f"reward_{terms[0]}": reward})
    table = pa.Table.from_pylist(scores, score_schema(terms))
    return ScoredShard(write_rollouts(store, *rollouts), write_shard(store, table, kind="scores", metadata={}))


def estimate_work(uri: str, student: ModelVersion, teacher: ModelVersion | None, **scored) -> EstimateWork:
    shards = tuple(scored_shard(uri, seed=seed, **scored) for seed in (0, 1))
    return EstimateWork(iteration=1, shards=shards, policy=student, teacher=teacher)


def sequences_of(uri: str, work: EstimateWork) -> list[ModelInput]:
    """Return prompts and completions of the rollouts as inputs of models."""
    rows = [row for shard in work.shards for row in read_shard(open_store(f"{uri}/run"), shard.rollouts).to_pylist()]
    return [ModelInput.from_prompt(row["prompt_tokens"]).append_completion(row["completion_tokens"]) for row in rows]


def give_credit(uri: str, work: EstimateWork, estimates: tuple[ShardRef, ...], algorithm) -> Outcome:
    asked = CreditWork(iteration=1, shards=work.shards, estimates=estimates, max_new_tokens=20)
    return ScoringWorker(uri, "run", SCORING, algorithm).credit(asked)


def credit(uri: str, work: EstimateWork, estimates: tuple[ShardRef, ...], algorithm) -> pa.Table:
    """Return the training samples that credit computes from estimates."""
    return read_shard(open_store(f"{uri}/run"), give_credit(uri, work, estimates, algorithm).shards[0])


def rows_of(uri: str, shards: tuple[ShardRef, ...]) -> list[dict]:
    return [row for shard in shards for row in read_shard(open_store(f"{uri}/run"), shard).to_pylist()]
