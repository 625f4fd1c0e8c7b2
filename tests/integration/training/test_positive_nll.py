"""Negative log-likelihood of correct completions as a term of the loss, from the scores to the gradients."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.shards import write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.corrections import NoCorrection
from rheostat.models.config.divergence import NoKl
from rheostat.models.config.objectives import PositiveNll
from rheostat.models.records.schemas import SAMPLE_SCHEMA, TERM_REWARD
from tests.support.processes import preload
from tests.support.update_workers import (
    LORA,
    UNCLIPPED,
    Job,
    change,
    gradients,
    read_rows,
    run_on_ranks,
    start_worker,
    update_work,
)

preload(__name__)

PLAIN = change(UNCLIPPED, kl=NoKl(), correction=NoCorrection(), max_staleness=1)
CONFIG = change(PLAIN, positive_nll=PositiveNll(coefficient=0.3, min_reward=0.5))
SAMPLES = {"stalest": 2, "seed": 4}


def score(uri: str, work, *, correct: float = 0.4):
    """Return the work with a score of every sample, of which some are correct, and the scores."""
    rows, rng = read_rows(uri, work), np.random.default_rng(3)
    scores = [0.5 + rng.random() if rng.random() < correct else None if number % 2 else 0.4 for number in range(24)]
    for row, each in zip(rows, scores, strict=True):
        row[TERM_REWARD] = each
    schema = pa.schema([*SAMPLE_SCHEMA, (TERM_REWARD, pa.float64())])
    table = pa.Table.from_pylist(rows, schema)
    return replace(work, samples=(write_shard(open_store(f"{uri}/run"), table, kind="samples", metadata={}),)), scores


def compute_expected(directory, rows: list[dict], scores) -> tuple[np.ndarray, float]:
    """Return the gradient of 0.3 x the mean negative log-prob of all tokens of correct samples, without the tokens that
    are more than 1 version old, and the mean."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    values, count = [], 0
    for row, each in zip(rows, scores, strict=True):
        if each is None or each < 0.5:
            continue
        tokens_1T, begin = torch.tensor([row["tokens"]]), row["num_prompt_tokens"]
        logprobs_TV = (model(tokens_1T).logits[0, begin - 1 : -1] / 0.9).log_softmax(-1)
        nll_T = -logprobs_TV.gather(1, tokens_1T[0, begin:, None])[:, 0]
        values.append(nll_T[torch.tensor(row["staleness"]) <= 1])
        count += len(nll_T)
    kept = torch.cat(values)
    (0.3 * kept.sum() / count).backward()
    return np.concatenate([each.grad.numpy().ravel() for each in model.parameters()]), kept.mean().item()


def test_the_gradient_is_that_of_the_mean_over_all_tokens_of_correct_samples(uri, policy):
    work, scores = score(uri, update_work(uri, policy, **SAMPLES))
    directory = fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    rows = read_rows(uri, work)
    expected, nll = compute_expected(directory, rows, scores)
    plain = gradients(uri, start_worker(uri, PLAIN).update(work))
    assert np.abs(expected).max() > 1e-3
    for tokens in (9999, 90):  # one micro-batch, or many
        outcome = start_worker(uri, change(CONFIG, microbatch_tokens=tokens)).update(work)
        np.testing.assert_allclose(gradients(uri, outcome) - plain, expected, atol=1e-6)
        assert outcome.metrics["positive_nll"] == pytest.approx(nll, rel=1e-4)
        recent = [sum(age <= 1 for age in row["staleness"]) for row in rows]
        correct = sum(count for count, each in zip(recent, scores, strict=True) if each is not None and each >= 0.5)
        assert outcome.metrics["positive_fraction"] == pytest.approx(correct / sum(recent))


def test_without_correct_samples_the_update_is_unchanged(uri, policy):
    work, _ = score(uri, update_work(uri, policy, **SAMPLES), correct=0)
    found, plain = (start_worker(uri, config).update(work) for config in (CONFIG, PLAIN))
    assert found.model.weights.digest == plain.model.weights.digest
    assert (found.metrics["positive_nll"], found.metrics["positive_fraction"]) == (0, 0)


def test_samples_without_scores_are_refused(uri, policy):
    with pytest.raises(BadInput, match=r"update.positive_nll needs the scores .* Remove the setting"):
        start_worker(uri, CONFIG).update(update_work(uri, policy))


@pytest.mark.system
def test_ranks_micro_batches_and_layouts_do_not_change_the_update(uri, policy):
    work, _ = score(uri, update_work(uri, policy, **SAMPLES))
    ways = {"whole": {}, "sharded": {"zero_stage": 3}, "slices": {"sequence_parallel": 2}, "adapters": {"lora": LORA}}
    jobs = {name: Job(change(CONFIG, microbatch_tokens=90, **way), [work]) for name, way in ways.items()}
    for name, [found] in run_on_ranks(uri, jobs).items():
        alone = start_worker(uri, change(CONFIG, lora=ways[name].get("lora"))).update(work)
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6), name
        assert 0.1 < alone.metrics["positive_fraction"] < 0.9
        if name in ("whole", "slices"):
            np.testing.assert_allclose(gradients(uri, found), gradients(uri, alone), atol=1e-6, err_msg=name)
