"""The critic: its values, its initial weights, the estimates before credit, and its steps next to the policy's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Gemma3TextConfig,
)

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import CriticConfig, Ppo
from rheostat.models.modeling.critic import TokenValues, classifier_from_policy, critic_from_classifier, write_critic
from rheostat.models.modeling.logprobs import ForwardInput
from rheostat.models.modeling.policy import load_policy, save_policy
from rheostat.models.records.schemas import ESTIMATE_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import CriticWork, EstimateWork, ScoredShard, UpdateWork
from rheostat.models.text.tokenizer import load_tokenizer, train_tokenizer
from rheostat.models.workers.preparation import PreparationWorker
from tests.support.critics import ALGORITHM, critic_work, start_critic
from tests.support.policies import ARCHITECTURES, DECODER, write_policy
from tests.support.processes import preload
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.update_workers import (
    CONFIG,
    LORA,
    UNCLIPPED,
    Job,
    change,
    perform,
    read_rows,
    run_on_ranks,
    with_rows,
)

preload(__name__)


@pytest.fixture
def critic(uri: str, policy: ModelVersion) -> ModelVersion:
    """Critic whose head is not zero."""
    store = open_store(f"{uri}/run")
    directory = Path(uri, "critic")
    directory.mkdir()
    write_classifier(fetch_bundle(store, policy.weights), directory)
    return ModelVersion(version=0, weights=publish_bundle(store, directory, prefix="critics"))


def write_classifier(policy: Path, directory: Path) -> None:
    """Write a classifier with a random head on a policy's trunk."""
    model = classifier_from_policy(policy)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    save_policy(model, load_tokenizer(policy), directory)


# ---- values
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@torch.no_grad()
def test_values_are_the_logits_of_the_classifier_at_every_position(architecture, tmp_path):
    write_policy(tmp_path / "policy", architecture)
    write_classifier(tmp_path / "policy", tmp_path / "classifier")
    model = critic_from_classifier(tmp_path / "classifier", tmp_path / "policy").eval()
    tokens_BT = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    values = TokenValues(model)(ForwardInput(tokens_BT, torch.arange(18), tokens_BT.flatten())).view(2, 9)
    assert values.dtype == torch.float32
    for end in range(1, 10):
        logits_B = model(input_ids=tokens_BT[:, :end], attention_mask=torch.ones(2, end)).logits[:, 0]
        torch.testing.assert_close(values[:, end - 1], logits_B, rtol=1e-4, atol=1e-5)
    assert values.std() > 0.1


# ---- where a critic starts
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@torch.no_grad()
def test_a_critic_built_from_a_policy_has_the_policys_trunk_and_predicts_zero(architecture, tmp_path):
    write_policy(tmp_path / "policy", architecture)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_critic(None, tmp_path / "policy", tmp_path / name)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "one")
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, weight in actor.base_model.state_dict().items():
        assert torch.equal(critic.base_model.state_dict()[name], weight)
    tokens_BT = torch.randint(2, 300, (2, 9))
    assert not TokenValues(critic)(ForwardInput(tokens_BT, torch.arange(18), tokens_BT.flatten())).any()


def test_a_critic_keeps_the_weights_of_the_directory_it_starts_from(uri, policy, tmp_path):
    source = fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    write_classifier(source, tmp_path / "classifier")
    worker = PreparationWorker(uri, "run", threads=1)
    made = worker.make_critic(CriticWork(policy=policy, critic=CriticConfig(path=tmp_path / "classifier")))
    assert made.model is None
    written = fetch_bundle(open_store(f"{uri}/run"), made.critic.weights) / "model.safetensors"
    assert written.read_bytes() == (tmp_path / "classifier/model.safetensors").read_bytes()


def write_otherwise(kind: str, policy: Path, directory: Path) -> None:
    """Write a directory from which no critic of the policy can start."""
    model, tokenizer = classifier_from_policy(policy), load_tokenizer(policy)
    if kind == "tokenizer":
        tokenizer = train_tokenizer(["other words altogether"], vocab_size=300, context=64)
    elif kind == "language model":
        model = load_policy(policy)
    elif kind == "bidirectional":
        config = Gemma3TextConfig(
            **DECODER, vocab_size=354, pad_token_id=0, num_labels=1, use_bidirectional_attention=True
        )
        model = AutoModelForSequenceClassification.from_config(config)
        torch.nn.init.normal_(model.score.weight)
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = BertForSequenceClassification(BertConfig(vocab_size=354, num_labels=1, **sizes))
    save_policy(model, tokenizer, directory)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tokenizer", r"critic .*classifier: .*tokenizer .* the policy 354\)"),
        ("language model", "sequence classifier"),
        ("bidirectional", "for the same text at the start of a longer one.* causal decoder"),
        ("encoder", "no linear layer `score`"),
    ],
)
def test_a_directory_that_cannot_value_the_policys_tokens_is_refused_as_critic(tmp_path, kind, message):
    write_policy(tmp_path / "policy")
    write_otherwise(kind, tmp_path / "policy", tmp_path / "classifier")
    with pytest.raises(BadInput, match=message):
        critic_from_classifier(tmp_path / "classifier", tmp_path / "policy")


# ---- estimates
def write_random_rollouts(uri: str, *, prompts: int = 5, group: int = 3, first: int = 0) -> ShardRef:
    """Write rollouts of random tokens and lengths."""
    rng, rows = np.random.default_rng(first), []
    for prompt in range(first, first + prompts):
        shared = rng.integers(2, 300, rng.integers(3, 12)).tolist()
        for sample in range(group):
            tokens = rng.integers(2, 300, rng.integers(1, 20)).tolist()
            columns = {"prompt_tokens": shared, "completion_tokens": tokens, "logprobs": [-1.0] * len(tokens)}
            rows.append(rollout(prompt, sample, "", **columns))
    return write_rollouts(open_store(f"{uri}/run"), *rows)


def estimate_work(uri: str, policy: ModelVersion, critic: ModelVersion) -> EstimateWork:
    """Two shards. Only some prompts of one of them are used."""
    shards = [write_random_rollouts(uri, first=first) for first in (0, 10)]
    return EstimateWork(
        iteration=1,
        shards=tuple(
            ScoredShard(rollouts=shard, scores=shard, rows=rows)
            for shard, rows in zip(shards, ((1, 3), None), strict=True)
        ),
        policy=policy,
        reference=policy,
        critic=critic,
    )


def columns(uri: str, outcome: Outcome) -> dict[str, list[np.ndarray]]:
    tables = [read_shard(open_store(f"{uri}/run"), ref).replace_schema_metadata(None) for ref in outcome.shards]
    rows = pa.concat_tables(tables).to_pylist()
    return {name: [np.array(row[name]) for row in rows] for name in ESTIMATE_SCHEMA.names}


@torch.no_grad()
def test_estimates_are_those_of_transformers_for_each_sequence(uri, policy, critic):
    work = estimate_work(uri, policy, critic)
    outcome = start_critic(uri).estimate(work)
    store = open_store(f"{uri}/run")
    assert [ref.rows for ref in outcome.shards] == [6, 15]
    assert outcome.metrics["sequences"] == 21
    found = columns(uri, outcome)
    actor = AutoModelForCausalLM.from_pretrained(fetch_bundle(store, policy.weights))
    valuer = AutoModelForSequenceClassification.from_pretrained(fetch_bundle(store, critic.weights))
    rollouts = [row for shard in work.shards for row in read_shard(store, shard.rollouts).to_pylist()]
    counted = [row for row in rollouts if row["prompt_row"] in (1, 3) or row["prompt_row"] >= 10]
    assert found["prompt_row"] == [row["prompt_row"] for row in counted]
    assert found["sample"] == [row["sample"] for row in counted]
    assert found["teacher"] == found["policy"] == [None] * 21
    for row, reference, values in zip(counted, found["reference"], found["values"], strict=True):
        prompt, completion = row["prompt_tokens"], row["completion_tokens"]
        tokens_BT = torch.tensor([prompt + completion])
        logits = actor(tokens_BT).logits[0, len(prompt) - 1 : -1] / 0.9
        expected = torch.log_softmax(logits, -1)[torch.arange(len(completion)), torch.tensor(completion)]
        np.testing.assert_allclose(reference, expected, atol=1e-5)
        states = valuer.base_model(tokens_BT).last_hidden_state[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(values, valuer.score(states)[:, 0], atol=1e-5)


def test_estimates_are_the_same_bits_before_and_after_an_update(uri, policy, critic):
    work = estimate_work(uri, policy, critic)
    worker = start_critic(uri)
    first = worker.estimate(work)
    assert worker.estimate(work).shards == first.shards
    outcome = worker.update(critic_work(uri, policy, critic))
    assert worker.estimate(work).shards == first.shards
    later = replace(work, policy=outcome.model, critic=outcome.critic)
    found = worker.estimate(later)
    assert found.shards != first.shards
    assert start_critic(uri).estimate(later).shards == found.shards


@pytest.mark.thorough
def test_an_estimate_does_not_reload_the_models_of_a_hot_worker(uri, policy, critic, caplog):
    worker = start_critic(uri)
    outcome = worker.update(critic_work(uri, policy, critic))
    with caplog.at_level("INFO", logger="rheostat.models.training.versions"):
        caplog.clear()
        worker.estimate(replace(estimate_work(uri, outcome.model, outcome.critic), reference=None))
        again = worker.update(critic_work(uri, outcome.model, outcome.critic))
    assert not caplog.records
    cold = start_critic(uri).update(critic_work(uri, outcome.model, outcome.critic))
    assert (cold.model, cold.critic) == (again.model, again.critic)


# ---- the update
@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("lora", [None, LORA])
def test_an_update_with_a_critic_gives_the_same_bits_repeated_and_in_a_new_worker(uri, policy, critic, lora):
    config = change(CONFIG, lora=lora)
    hot = start_critic(uri, config)
    first = hot.update(critic_work(uri, policy, critic))
    work = critic_work(uri, first.model, first.critic)
    outcome = hot.update(work)
    repeated, cold = hot.update(work), start_critic(uri, config).update(work)
    for other in (repeated, cold):
        assert (other.model, other.critic, other.metrics) == (outcome.model, outcome.critic, outcome.metrics)
    versions = (critic, first.critic, outcome.critic)
    assert [version.version for version in versions] == [0, 1, 2]
    assert len({version.digest for version in versions}) == 3
    assert len({version.state for version in versions}) == 3
    assert (outcome.critic.weights == critic.weights) == (lora is not None)
    later, before = (estimate_work(uri, *pair) for pair in ((outcome.model, outcome.critic), (policy, critic)))
    assert hot.estimate(later).shards == start_critic(uri, config).estimate(later).shards
    values, earlier = (columns(uri, hot.estimate(each))["values"][0] for each in (later, before))
    assert values != pytest.approx(earlier)


def test_the_policy_is_trained_to_the_same_weights_with_and_without_a_critic(uri, policy, critic):
    work = critic_work(uri, policy, critic)
    assert start_critic(uri).update(work).model == start_critic(uri).update(replace(work, critic=None)).model


def test_the_policy_does_not_change_while_the_critic_warms_up(uri, policy, critic):
    worker = start_critic(uri)
    trained = worker.update(critic_work(uri, policy, critic))
    work = critic_work(uri, trained.model, trained.critic)
    still, moving = worker.update(replace(work, learns=False)), worker.update(work)
    assert still.model == replace(trained.model, version=2)
    assert still.critic == moving.critic
    assert still.metrics["value_loss"] == moving.metrics["value_loss"]
    assert "loss" not in still.metrics


def test_the_critics_loss_is_the_mean_of_clipped_token_losses(uri, policy, critic):
    config = change(CONFIG, minibatches=1)
    work = critic_work(uri, policy, critic, learns=False)
    metrics = start_critic(uri, config).update(work).metrics
    store = open_store(f"{uri}/run")
    valuer = AutoModelForSequenceClassification.from_pretrained(fetch_bundle(store, critic.weights))
    losses, clipped = [], []
    for row in read_rows(uri, work):
        begin = row["num_prompt_tokens"] - 1
        states = valuer.base_model(torch.tensor([row["tokens"]])).last_hidden_state[0, begin:-1]
        values = valuer.score(states)[:, 0].detach().numpy()
        old, returns = np.array(row["values"]), np.array(row["returns"])
        kept = (np.clip(values, old - 0.2, old + 0.2) - returns) ** 2
        losses += np.maximum((values - returns) ** 2, kept).tolist()
        clipped += (kept > (values - returns) ** 2).tolist()
    assert metrics["value_loss"] == pytest.approx(np.mean(losses) / 2, rel=1e-5)
    assert metrics["value_clip_fraction"] == pytest.approx(np.mean(clipped))


def test_the_critic_is_trained_to_predict_the_returns(uri, policy, critic):
    algorithm = Ppo(critic=CriticConfig(learning_rate=3e-3, clip=100.0))
    worker, losses = start_critic(uri, change(CONFIG, microbatch_tokens=9999), algorithm=algorithm), []
    for _ in range(12):
        outcome = worker.update(critic_work(uri, policy, critic, learns=False))
        critic = outcome.critic
        losses.append(outcome.metrics["value_loss"])
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("column", ["advantages", "returns"])
def test_a_value_that_is_not_finite_discards_the_update_of_policy_and_critic(uri, policy, critic, column):
    worker = start_critic(uri)
    work = critic_work(uri, policy, critic)
    rows = read_rows(uri, work)
    rows[3][column] = [float("nan")] * len(rows[3][column])
    outcome = worker.update(with_rows(uri, work, rows))
    assert outcome.metrics["quarantined"] == 1
    assert (outcome.model, outcome.critic) == (replace(policy, version=1), replace(critic, version=1))
    after = critic_work(uri, outcome.model, outcome.critic)
    found, fresh = worker.update(after), start_critic(uri).update(after)
    assert (found.model, found.critic) == (fresh.model, fresh.critic)


# ---- several ranks
def works_of(uri: str, policy: ModelVersion, critic: ModelVersion) -> list[EstimateWork | UpdateWork]:
    return [estimate_work(uri, policy, critic), critic_work(uri, policy, critic)]


def follow_up(uri: str, outcome: Outcome) -> list[EstimateWork | UpdateWork]:
    return works_of(uri, outcome.model, outcome.critic)


def assert_same_after_restart(uri: str, policy: ModelVersion, critic: ModelVersion, configs: list) -> list[Outcome]:
    """Restart two ranks after the first update; return the outcomes of the first configuration."""
    first = works_of(uri, policy, critic)
    jobs = {str(number): Job(config, first, follow_up, ALGORITHM) for number, config in enumerate(configs)}
    # A rank without a sequence has nothing to estimate, and the other rank does not wait for it.
    single = write_random_rollouts(uri, prompts=1, group=1)
    lonely = replace(first[0], shards=(ScoredShard(rollouts=single, scores=single),))
    hot = run_on_ranks(uri, jobs | {"one sequence": Job(configs[-1], [lonely], algorithm=ALGORITHM)})
    assert hot["one sequence"][0].metrics["sequences"] == 1
    jobs = {name: Job(job.config, follow_up(uri, hot[name][1]), algorithm=ALGORITHM) for name, job in jobs.items()}
    for name, (estimated, updated) in run_on_ranks(uri, jobs).items():
        assert estimated.shards == hot[name][2].shards
        assert (updated.model, updated.critic) == (hot[name][3].model, hot[name][3].critic)
    return hot["0"]


@pytest.mark.system
@pytest.mark.parametrize("slices", [1, 2])
def test_two_ranks_compute_the_same_estimates_and_values_as_one_and_continue_with_equal_bits(
    uri, policy, critic, slices
):
    configs = [change(UNCLIPPED, sequence_parallel=slices)]
    outcomes = assert_same_after_restart(uri, policy, critic, configs)[:2]
    worker = start_critic(uri, UNCLIPPED)
    alone = [perform(worker, work) for work in works_of(uri, policy, critic)]
    found, expected = (columns(uri, estimated) for estimated, _ in (outcomes, alone))
    for name in ("reference", "values"):
        for several, one in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(one, several, atol=1e-5)
    for name in ("value_loss", "critic_grad_norm", "explained_variance", "value_clip_fraction"):
        assert outcomes[1].metrics[name] == pytest.approx(alone[1].metrics[name], rel=1e-4)


@pytest.mark.slow
def test_a_critic_continues_with_the_same_bits_under_every_stage_and_precision(uri, policy, critic):
    kinds = [{"zero_stage": stage, "dtype": dtype} for dtype in ("float32", "bfloat16") for stage in range(4)]
    assert_same_after_restart(uri, policy, critic, [change(CONFIG, **kind) for kind in kinds])
