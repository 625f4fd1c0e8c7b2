"""Distillation over the teacher's most probable tokens: what is stored, and the updates that follow."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rheostat.infra.errors import BadInput
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import DistillationOnly, Grpo
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.teachers import TopK
from rheostat.models.objectives.top_k import compute_top_k_divergence
from rheostat.models.records.schemas import TOP_IDS, TOP_LOGPROBS
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from tests.support.distillation import HELD, credit, estimate_work, give_credit, rows_of, sequences_of
from tests.support.processes import preload
from tests.support.rollout_shards import write_rollouts
from tests.support.training import TINY, publish_scratch
from tests.support.update_workers import (
    LORA,
    Job,
    change,
    distance,
    gradients,
    load_trained,
    run_on_ranks,
    start_worker,
)

preload(__name__)

CONFIG = UpdateConfig(learning_rate=1e-3, minibatches=1, microbatch_tokens=90, max_grad_norm=1e9)
VOCABULARY = 354


@pytest.fixture
def student(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "student"))


@pytest.fixture
def teacher(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "teacher"), policy=change(TINY, hidden_size=48), seed=5)


def distilled(tokens: int = 8, direction="reverse", coefficient: float = 1.0) -> DistillationOnly:
    settings = HELD.model_copy(update={"top_k": TopK(tokens=tokens, direction=direction), "coefficient": coefficient})
    return DistillationOnly(distillation=settings)


def prepare(uri: str, student: ModelVersion, teacher: ModelVersion, algorithm) -> UpdateWork:
    """Return the update that follows from estimates by one rank."""
    work = estimate_work(uri, student, teacher)
    estimates = start_worker(uri, CONFIG, algorithm=algorithm).estimate(work).shards
    shards = give_credit(uri, work, estimates, algorithm).shards
    return UpdateWork(iteration=1, policy=student, reference=student, samples=shards, total_iterations=1, seed=0)


def logprobs_by_token(directory: Path, uri: str, work) -> list[torch.Tensor]:
    """Return the log-probs of the whole vocabulary at each completion token, for each sequence."""
    model, found = AutoModelForCausalLM.from_pretrained(directory).eval(), []
    for each in sequences_of(uri, work):
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(each.tokens.astype(np.int64))[None]).logits[0]
        found.append((logits_TV / 0.9).log_softmax(-1)[each.num_prompt_tokens - 1 : -1])
    return found


def test_estimates_and_samples_contain_the_most_probable_tokens_of_the_teacher(uri, student, teacher):
    work, algorithm = estimate_work(uri, student, teacher), distilled()
    estimates = start_worker(uri, CONFIG, algorithm=algorithm).estimate(work).shards
    rows, expected = rows_of(uri, estimates), logprobs_by_token(Path(uri, "teacher"), uri, work)
    for row, logprobs_TV in zip(rows, expected, strict=True):
        best = logprobs_TV.topk(8)
        assert row[TOP_IDS] == best.indices.flatten().tolist()
        np.testing.assert_allclose(row[TOP_LOGPROBS], best.values.flatten(), atol=2e-5)
    samples = credit(uri, work, estimates, algorithm).to_pylist()
    stored = {(row["prompt_row"], row["sample"]): row for row in rows}
    for sample in samples:
        assert not any(sample["advantages"])  # the divergence is part of the loss instead
        for name in (TOP_IDS, TOP_LOGPROBS):
            assert sample[name] == stored[sample["prompt_row"], sample["sample"]][name]


def test_turns_of_an_episode_have_the_most_probable_tokens_of_their_own_tokens(uri, student, teacher):
    store, algorithm = open_store(f"{uri}/run"), distilled()
    work, expected = estimate_work(uri, student, teacher), {}
    model, shards = AutoModelForCausalLM.from_pretrained(Path(uri, "teacher")).eval(), []
    for shard in work.shards:
        rows = read_shard(store, shard.rollouts).to_pylist()
        for row in rows:
            prompt, tokens, rest = row["prompt_tokens"], row["completion_tokens"], len(row["completion_tokens"]) - 4
            if rest < 1:
                continue
            parts = ((0, 2), (-1, 1), (-2, 1), (0, rest))  # text of an environment, then the prompt of another turn
            row["segments"] = [{"policy_version": version, "tokens": count} for version, count in parts]
            sequences = ((prompt + tokens[:2], 2), (tokens[3:], rest))
            for texts, count in sequences:
                with torch.no_grad():
                    logits_TV = model(torch.tensor([texts])).logits[0, -count - 1 : -1]
                best = expected.setdefault((row["prompt_row"], row["sample"]), [])
                best.append(logits_TV.topk(8).indices.flatten().tolist())
        shards.append(replace(shard, rollouts=write_rollouts(store, *rows)))
    work = replace(work, shards=tuple(shards))
    estimates = start_worker(uri, CONFIG, algorithm=algorithm).estimate(work).shards
    samples, found = credit(uri, work, estimates, algorithm).to_pylist(), {}
    for sample in samples:
        found.setdefault((sample["prompt_row"], sample["sample"]), []).append(sample[TOP_IDS])
    assert len(expected) > 10
    assert {name: found[name] for name in expected} == expected
    update = UpdateWork(1, student, student, give_credit(uri, work, estimates, algorithm).shards, 1, 0)
    assert start_worker(uri, CONFIG, algorithm=algorithm).update(update).metrics["teacher_divergence"] > 0


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("tokens", [8, VOCABULARY])
def test_the_loss_is_the_mean_divergence_times_the_coefficient(uri, student, teacher, tokens, direction):
    algorithm = distilled(tokens, direction, coefficient=0.5)
    outcome = start_worker(uri, CONFIG, algorithm=algorithm).update(prepare(uri, student, teacher, algorithm))
    work, divergences = estimate_work(uri, student, teacher), []
    pairs = (logprobs_by_token(Path(uri, name), uri, work) for name in ("student", "teacher"))
    for policy_TV, teacher_TV in zip(*pairs, strict=True):
        best = teacher_TV.topk(tokens)
        policy_TK = policy_TV.gather(-1, best.indices)
        divergences.append(compute_top_k_divergence(policy_TK, best.values, direction=direction))
    expected = float(torch.cat(divergences).mean())
    assert outcome.metrics["teacher_divergence"] == pytest.approx(expected, rel=1e-3)
    assert outcome.metrics["loss"] == pytest.approx(0.5 * expected, rel=1e-3)


def test_samples_without_the_most_probable_tokens_are_refused(uri, student, teacher):
    algorithm = distilled()
    plain = algorithm.model_copy(update={"distillation": algorithm.distillation.model_copy(update={"top_k": None})})
    work = prepare(uri, student, teacher, plain)
    with pytest.raises(BadInput, match=r"algorithm.distillation.top_k needs .* computed without this setting"):
        start_worker(uri, CONFIG, algorithm=algorithm).update(work)


def test_a_teacher_that_is_the_student_changes_nothing(uri, student):
    algorithm = distilled()
    outcome = start_worker(uri, CONFIG, algorithm=algorithm).update(prepare(uri, student, student, algorithm))
    assert outcome.metrics["teacher_divergence"] == pytest.approx(0, abs=1e-6)
    assert outcome.metrics["grad_norm_max"] < 1e-5


@pytest.mark.parametrize("top_entropy", [None, 0.4])
def test_the_divergence_is_added_to_the_loss_of_rewards(uri, student, teacher, top_entropy):
    config = change(CONFIG, top_entropy=top_entropy)
    settings = distilled().distillation
    both, found = Grpo(distillation=settings), {}
    for name, algorithm in (("both", both), ("teacher", distilled())):
        work = prepare(uri, student, teacher, algorithm)
        found[name] = start_worker(uri, config, algorithm=algorithm).update(work)
    rewards = Grpo(keep_uninformative=True)
    plain = estimate_work(uri, student, teacher)
    work = replace(prepare(uri, student, teacher, both), samples=give_credit(uri, plain, (), rewards).shards)
    found["rewards"] = start_worker(uri, config, algorithm=rewards).update(work)
    steps = {name: gradients(uri, outcome) for name, outcome in found.items()}
    np.testing.assert_allclose(steps["both"], steps["teacher"] + steps["rewards"], atol=1e-5)
    masked = found["both"].metrics.get("low_entropy_fraction", 0)
    assert masked == (0 if top_entropy is None else pytest.approx(1 - top_entropy, abs=0.05))
    assert np.abs(steps["rewards"]).max() > 1e-3


def test_updates_bring_the_policy_closer_to_the_teacher(uri, student, teacher):
    for direction in ("reverse", "forward"):
        algorithm = distilled(direction=direction)
        config = change(CONFIG, epochs=4, learning_rate=3e-3)
        work = prepare(uri, student, teacher, algorithm)
        outcome = start_worker(uri, config, algorithm=algorithm).update(work)
        after = prepare(uri, outcome.model, teacher, algorithm)
        outcomes = [start_worker(uri, CONFIG, algorithm=algorithm).update(each) for each in (work, after)]
        values = [each.metrics["teacher_divergence"] for each in outcomes]
        assert values[1] < 0.9 * values[0], direction


@pytest.mark.system
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_ranks_and_micro_batches_and_layouts_do_not_change_the_update(uri, student, teacher, direction):
    algorithm = distilled(direction=direction)
    work = prepare(uri, student, teacher, algorithm)
    estimate = estimate_work(uri, student, teacher)
    layouts = {
        "whole": {},
        "sharded": {"zero_stage": 3},
        "sequence parallel": {"sequence_parallel": 2},
        "adapters": {"lora": LORA},
    }
    jobs = {
        name: Job(change(CONFIG, **changes), [estimate, work], algorithm=algorithm) for name, changes in layouts.items()
    }
    many = run_on_ranks(uri, jobs)
    run_alone = partial(start_worker, uri, algorithm=algorithm)
    for name, (estimated, found) in many.items():
        lora = layouts[name].get("lora")
        alone = run_alone(change(CONFIG, microbatch_tokens=9999, lora=lora)).update(work)
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6), name
        assert distance(load_trained(uri, found.model), load_trained(uri, alone.model)) < 1e-2, name
        rows = zip(
            rows_of(uri, estimated.shards), rows_of(uri, run_alone(CONFIG).estimate(estimate).shards), strict=True
        )
        for own, expected in rows:
            assert own[TOP_IDS] == expected[TOP_IDS], name
            np.testing.assert_allclose(own[TOP_LOGPROBS], expected[TOP_LOGPROBS], atol=1e-5, err_msg=name)
