"""On-policy distillation on real ranks: what the teacher says of each token, and what the token is worth for it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from infra.errors import BadInput, EndpointDown
from infra.store.shards import ShardRef, read_shard, write_shard
from infra.store.storage import open_store
from models.config.algorithms import DistillationOnly, Grpo
from models.config.objectives import UpdateConfig
from models.config.reward_terms import NumericReward
from models.config.rewards import ScoringConfig
from models.config.teachers import Distillation, TeacherDirectory
from models.records.model_input import ModelInput
from models.records.schemas import ROLLOUT_SCHEMA, FinishReason, score_schema
from models.records.versions import ModelVersion, Outcome
from models.records.work import CreditWork, EstimateWork, ScoredShard
from models.workers.scoring import ScoringWorker
from models.workers.update import UpdateWorker
from tests.support.chat_server import Reply
from tests.support.processes import preload
from tests.support.teachers import by_hand, teacher_at, teacher_server
from tests.support.training import TINY, publish_scratch
from tests.support.update_workers import free_port, together

preload(__name__)

HELD = Distillation(teacher=TeacherDirectory(path=Path("elsewhere")))
ALONE = DistillationOnly(distillation=HELD)
SCORING = ScoringConfig(rewards=(NumericReward(weight=1),), max_missing=1.0)


@pytest.fixture
def student(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "student"))


def publish_teacher(uri: str, *, seed: int = 5) -> ModelVersion:
    bigger = TINY.model_copy(update={"hidden_size": 48, "intermediate_size": 64})
    return publish_scratch(f"{uri}/run", Path(uri, "teacher"), policy=bigger, seed=seed)


def scored_shard(uri: str, *, seed: int, rewards: tuple[float, ...] = (1.0, 0.0, 0.0), prompts: int = 3) -> ScoredShard:
    """Random completions of random lengths, with given rewards in every group."""
    store, rng, terms = open_store(f"{uri}/run"), np.random.default_rng(seed), SCORING.terms
    rollouts, scores = [], []
    for prompt in range(prompts * seed, prompts * (seed + 1)):
        for sample, reward in enumerate(rewards):
            length = int(rng.integers(1, 20))
            rollouts.append(
                {
                    "prompt_row": prompt,
                    "sample": sample,
                    "prompt_id": str(prompt),
                    "prompt": "",
                    "completion": "",
                    "answer": "",
                    "prompt_tokens": rng.integers(2, 300, int(rng.integers(3, 12))).tolist(),
                    "completion_tokens": rng.integers(2, 300, length).tolist(),
                    "logprobs": rng.normal(-5, 1, length).tolist(),
                    "finish_reason": FinishReason.STOP.value,
                    "seed": 0,
                    "segments": [{"policy_version": 0, "tokens": length}],
                }
            )
            scores.append({"prompt_row": prompt, "sample": sample, "reward": reward, f"reward_{terms[0]}": reward})
    written = (
        write_shard(store, pa.Table.from_pylist(rows, schema), kind=kind, metadata={})
        for rows, schema, kind in ((rollouts, ROLLOUT_SCHEMA, "rollouts"), (scores, score_schema(terms), "scores"))
    )
    return ScoredShard(*written)


def start(uri: str, algorithm=ALONE, update: UpdateConfig | None = None, *, rank=0, ranks=1, port=0) -> UpdateWorker:
    config = update or UpdateConfig(microbatch_tokens=90)
    worker = UpdateWorker(uri, "run", update=config, algorithm=algorithm, temperature=0.9, threads=1)
    worker.join(rank, ranks, "127.0.0.1", port or free_port())
    return worker


def estimate_work(uri: str, student: ModelVersion, teacher: ModelVersion | None, **scored) -> EstimateWork:
    shards = tuple(scored_shard(uri, seed=seed, **scored) for seed in (0, 1))
    return EstimateWork(iteration=1, shards=shards, policy=student, teacher=teacher)


def give_credit(uri: str, work: EstimateWork, estimates: tuple[ShardRef, ...], algorithm) -> Outcome:
    asked = CreditWork(iteration=1, shards=work.shards, estimates=estimates, max_new_tokens=20)
    return ScoringWorker(uri, "run", SCORING, algorithm).credit(asked)


def credit(uri: str, work: EstimateWork, estimates: tuple[ShardRef, ...], algorithm) -> pa.Table:
    """The training samples that credit makes of estimates."""
    return read_shard(open_store(f"{uri}/run"), give_credit(uri, work, estimates, algorithm).shards[0])


def columns(uri: str, shards: tuple[ShardRef, ...], *names: str) -> list[np.ndarray]:
    """Columns of estimates, all completions one after the other."""
    tables = [read_shard(open_store(f"{uri}/run"), shard) for shard in shards]
    return [np.concatenate([np.concatenate(table[name].to_pylist()) for table in tables]) for name in names]


def advantages(samples: pa.Table) -> np.ndarray:
    return np.concatenate(samples["advantages"].to_pylist())


# ---- a teacher that is the student


@pytest.mark.parametrize(
    "update",
    [
        UpdateConfig(microbatch_tokens=90),
        UpdateConfig(microbatch_tokens=90, zero_stage=3),
        UpdateConfig(microbatch_tokens=90, zero_stage=2, dtype="bfloat16"),
    ],
    ids=["float32", "zero3", "bfloat16"],
)
def test_a_teacher_that_is_the_student_is_worth_exactly_nothing(uri, student, update):
    work = estimate_work(uri, student, student)
    estimates = start(uri, update=update).estimate(work).shards
    policy, teacher = columns(uri, estimates, "policy", "teacher")
    assert len(policy) > 100
    assert np.all(policy < 0)
    np.testing.assert_array_equal(policy, teacher)
    found = advantages(credit(uri, work, estimates, ALONE))
    assert len(found) == len(policy)
    assert not found.any()


# ---- a teacher that knows better


def test_a_token_is_worth_what_the_teacher_says_less_what_the_student_says(uri, student):
    work = estimate_work(uri, student, publish_teacher(uri))
    found = advantages(credit(uri, work, start(uri).estimate(work).shards, ALONE))
    rows = [row for shard in work.shards for row in read_shard(open_store(f"{uri}/run"), shard.rollouts).to_pylist()]
    sequences = [ModelInput.given(row["prompt_tokens"]).continued(row["completion_tokens"]) for row in rows]
    said, own = (by_hand(Path(uri, name), sequences, temperature=0.9) for name in ("teacher", "student"))
    np.testing.assert_allclose(found, np.array(said) - np.array(own), atol=2e-5)


def test_an_opinion_is_added_to_what_rewards_make_and_scaled_by_its_coefficient(uri, student):
    work = estimate_work(uri, student, publish_teacher(uri))
    half = HELD.model_copy(update={"coefficient": 0.5})
    estimates = start(uri, Grpo(distillation=half)).estimate(work).shards
    policy, teacher = columns(uri, estimates, "policy", "teacher")
    both = advantages(credit(uri, work, estimates, Grpo(distillation=half)))
    rewards = advantages(credit(uri, work, (), Grpo()))
    np.testing.assert_allclose(both, rewards + 0.5 * (teacher - policy), atol=1e-5)
    told = give_credit(uri, work, estimates, Grpo(distillation=half)).metrics["teacher_kl"]
    assert told == pytest.approx(np.mean(policy - teacher), abs=1e-5)
    assert np.abs(rewards).min() > 0.1


def test_where_rewards_say_nothing_the_teacher_still_teaches(uri, student):
    work = estimate_work(uri, student, publish_teacher(uri), rewards=(1.0, 1.0))
    estimates = start(uri).estimate(work).shards
    policy, teacher = columns(uri, estimates, "policy", "teacher")
    for algorithm in (ALONE, Grpo(distillation=HELD)):
        np.testing.assert_allclose(advantages(credit(uri, work, estimates, algorithm)), teacher - policy, atol=1e-6)
    assert credit(uri, work, (), Grpo()).num_rows == 0


# ---- a teacher elsewhere


def elsewhere(url: str, **changes) -> DistillationOnly:
    return DistillationOnly(distillation=Distillation(teacher=teacher_at(url, **changes)))


def test_waiting_for_an_endpoint_is_progress_and_its_end_a_named_error(uri, student):
    work = estimate_work(uri, student, None)
    with teacher_server(Path(uri, "student"), faults=lambda asked, before: Reply(status=503)) as server:
        worker = start(uri, elsewhere(server.url, retries=2))
        with pytest.raises(EndpointDown, match="it answers 503"):
            worker.estimate(work)
    assert worker.progress() > 5  # passes of the policy, and attempts
    assert len(server.asked) >= 3


def test_a_teacher_that_the_work_does_not_name_is_an_error(uri, student):
    with pytest.raises(BadInput, match="expected the teacher's model to ask, found none"):
        start(uri).estimate(estimate_work(uri, student, None))


# ---- several ranks


def note_estimates(rank: int, ranks: int, port: int, uri: str, works: list, algorithms: list, slices: int) -> None:
    """Do one piece of work after another, each with an algorithm of its own."""
    update = UpdateConfig(microbatch_tokens=90, sequence_parallel=slices)
    workers = [start(uri, algorithm, update, rank=rank, ranks=ranks, port=port) for algorithm in algorithms]
    found = [worker.estimate(work).shards for worker, work in zip(workers, works, strict=True)]
    torch.save(found, Path(uri, f"estimates-{rank}.pt"))


@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=pytest.mark.system)])
def test_two_ranks_agree_with_one_whoever_the_teacher_is_and_each_sequence_is_asked_about_once(uri, student, slices):
    teacher = publish_teacher(uri)
    work = estimate_work(uri, student, teacher)
    itself, away = replace(work, teacher=student), replace(work, teacher=None)
    with teacher_server(Path(uri, "teacher")) as server:
        algorithms = [ALONE, ALONE, elsewhere(server.url)]
        together(note_estimates, uri, [work, itself, away], algorithms, slices)
    first, second = (torch.load(Path(uri, f"estimates-{rank}.pt"), weights_only=False) for rank in (0, 1))
    assert first == second
    held, own, asked = (columns(uri, shards, "policy", "teacher") for shards in first)
    np.testing.assert_allclose(held, columns(uri, start(uri).estimate(work).shards, "policy", "teacher"), atol=1e-5)
    np.testing.assert_array_equal(own[0], own[1])
    rows = [row for shard in work.shards for row in read_shard(open_store(f"{uri}/run"), shard.rollouts).to_pylist()]
    sequences = [ModelInput.given(row["prompt_tokens"]).continued(row["completion_tokens"]) for row in rows]
    np.testing.assert_allclose(asked[1], by_hand(Path(uri, "teacher"), sequences, temperature=1.0), atol=1e-4)
    prompts = [tuple(request.body["prompt"]) for request in server.asked]
    assert len(prompts) == len(set(prompts)) == len(rows)
