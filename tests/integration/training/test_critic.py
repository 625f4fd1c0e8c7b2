"""The critic: its values, where it starts, the estimates before credit, and its steps beside the policy's."""

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

from infra.errors import BadInput
from infra.store.bundles import fetch_bundle, publish_bundle
from infra.store.shards import ShardRef, read_shard, write_shard
from infra.store.storage import open_store
from models.config.algorithms import CriticConfig, Ppo
from models.config.lora import LoraConfig
from models.config.objectives import UpdateConfig
from models.modeling.critic import TokenValues, critic_from_classifier, critic_from_policy, write_critic
from models.modeling.logprobs import ForwardInput
from models.modeling.policy import save_policy
from models.records.schemas import ESTIMATE_SCHEMA, ROLLOUT_SCHEMA
from models.records.versions import ModelVersion, Outcome
from models.records.work import CriticWork, EstimateWork, ScoredShard
from models.text.tokenizer import load_tokenizer, train_tokenizer
from models.workers.preparation import PreparationWorker
from tests.support.critics import learn, start
from tests.support.policies import ARCHITECTURES, DECODER, write_policy
from tests.support.processes import preload
from tests.support.update_workers import CONFIG, staged, together

preload(__name__)


@pytest.fixture
def critic(uri: str, policy: ModelVersion) -> ModelVersion:
    """A critic whose head is not zero."""
    store = open_store(f"{uri}/run")
    directory = Path(uri, "critic")
    directory.mkdir()
    write_classifier(fetch_bundle(store, policy.weights), directory)
    return ModelVersion(version=0, weights=publish_bundle(store, directory, prefix="critics"))


def write_classifier(policy: Path, directory: Path) -> None:
    """Write a classifier with a random head on a policy's trunk."""
    model = critic_from_policy(policy)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    save_policy(model, load_tokenizer(policy), directory)


# ---- values
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@torch.no_grad()
def test_values_are_the_classifiers_own_logits_at_every_position(architecture, tmp_path):
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
def test_a_critic_made_from_a_policy_has_its_trunk_and_values_everything_at_zero(architecture, tmp_path):
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


def test_a_critic_with_another_tokenizer_is_refused(tmp_path):
    write_policy(tmp_path / "policy")
    model = critic_from_policy(tmp_path / "policy")
    save_policy(model, train_tokenizer(["other words altogether"], vocab_size=300, context=64), tmp_path / "classifier")
    with pytest.raises(BadInput, match=r"critic .*classifier: expected the policy's tokenizer \(354 tokens\), found"):
        critic_from_classifier(tmp_path / "classifier", tmp_path / "policy")


def test_a_critic_that_is_no_classifier_is_refused(tmp_path):
    write_policy(tmp_path / "policy")
    with pytest.raises(BadInput, match="expected a sequence classifier"):
        critic_from_classifier(tmp_path / "policy", tmp_path / "policy")


def test_a_critic_that_sees_what_comes_later_is_refused(tmp_path):
    write_policy(tmp_path / "policy")
    config = Gemma3TextConfig(**DECODER, vocab_size=354, pad_token_id=0, num_labels=1, use_bidirectional_attention=True)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    save_policy(model, load_tokenizer(tmp_path / "policy"), tmp_path / "classifier")
    with pytest.raises(BadInput, match="of the same text inside a longer one; expected a causal decoder"):
        critic_from_classifier(tmp_path / "classifier", tmp_path / "policy")


def test_an_encoder_is_no_critic(tmp_path):
    write_policy(tmp_path / "policy")
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=354,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=1,
        )
    )
    save_policy(model, load_tokenizer(tmp_path / "policy"), tmp_path / "classifier")
    with pytest.raises(BadInput, match="expected a decoder with a linear layer `score`"):
        critic_from_classifier(tmp_path / "classifier", tmp_path / "policy")


# ---- estimates
def write_rollouts(uri: str, *, prompts: int = 5, group: int = 3, first: int = 0) -> ShardRef:
    """Write rollouts of random tokens and lengths."""
    rng = np.random.default_rng(first)
    rows = []
    for prompt in range(first, first + prompts):
        shared = rng.integers(2, 300, rng.integers(3, 12)).tolist()
        for sample in range(group):
            length = int(rng.integers(1, 20))
            rows.append(
                {
                    "prompt_row": prompt,
                    "sample": sample,
                    "prompt_tokens": shared,
                    "completion_tokens": rng.integers(2, 300, length).tolist(),
                    "logprobs": [-1.0] * length,
                    "segments": [{"policy_version": 0, "tokens": length}],
                }
            )
    return write_shard(
        open_store(f"{uri}/run"), pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), kind="rollouts", metadata={}
    )


def asked(uri: str, policy: ModelVersion, critic: ModelVersion) -> EstimateWork:
    """Two shards, of one of which some prompts count."""
    shards = [write_rollouts(uri, first=first) for first in (0, 10)]
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
def test_estimates_are_those_of_each_sequence_by_itself(uri, policy, critic):
    work = asked(uri, policy, critic)
    outcome = start(uri).estimate(work)
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


def test_estimates_are_the_same_bits_whatever_ran_before(uri, policy, critic):
    work = asked(uri, policy, critic)
    worker = start(uri)
    first = worker.estimate(work)
    assert worker.estimate(work).shards == first.shards
    outcome = worker.update(learn(uri, policy, critic))
    assert worker.estimate(work).shards == first.shards
    later = replace(work, policy=outcome.model, critic=outcome.critic)
    found = worker.estimate(later)
    assert found.shards != first.shards
    assert start(uri).estimate(later).shards == found.shards


def test_an_estimate_leaves_a_hot_worker_where_it_is(uri, policy, critic, caplog):
    worker = start(uri)
    outcome = worker.update(learn(uri, policy, critic))
    with caplog.at_level("INFO", logger="models.training.versions"):
        caplog.clear()
        worker.estimate(replace(asked(uri, outcome.model, outcome.critic), reference=None))
        again = worker.update(learn(uri, outcome.model, outcome.critic))
    assert not caplog.records
    cold = start(uri).update(learn(uri, outcome.model, outcome.critic))
    assert (cold.model, cold.critic) == (again.model, again.critic)


# ---- the update
def test_an_update_with_a_critic_is_the_same_bits_hot_reloaded_and_repeated(uri, policy, critic):
    hot = start(uri)
    first = hot.update(learn(uri, policy, critic))
    work = learn(uri, first.model, first.critic)
    outcome = hot.update(work)
    repeated, cold = hot.update(work), start(uri).update(work)
    for other in (repeated, cold):
        assert (other.model, other.critic, other.metrics) == (outcome.model, outcome.critic, outcome.metrics)
    versions = (critic, first.critic, outcome.critic)
    assert [version.version for version in versions] == [0, 1, 2]
    assert len({version.weights.digest for version in versions}) == 3
    assert len({version.state for version in versions}) == 3


def test_the_policy_learns_the_same_with_and_without_a_critic(uri, policy, critic):
    work = learn(uri, policy, critic)
    assert start(uri).update(work).model == start(uri).update(replace(work, critic=None)).model


def test_with_adapters_the_critics_base_stays_and_its_delta_continues_bit_for_bit(uri, policy, critic):
    config = CONFIG.model_copy(update={"lora": LoraConfig(rank=4)})
    hot = start(uri, config)
    first = hot.update(learn(uri, policy, critic))
    work = learn(uri, first.model, first.critic)
    outcome, cold = hot.update(work), start(uri, config).update(work)
    assert (outcome.model, outcome.critic) == (cold.model, cold.critic)
    assert outcome.critic.weights == critic.weights
    assert len({version.digest for version in (critic, first.critic, outcome.critic)}) == 3
    later = asked(uri, outcome.model, outcome.critic)
    assert hot.estimate(later).shards == start(uri, config).estimate(later).shards
    assert columns(uri, hot.estimate(later))["values"][0] != pytest.approx(
        columns(uri, hot.estimate(asked(uri, policy, critic)))["values"][0]
    )


def test_while_the_critic_warms_up_the_policy_keeps_its_bits(uri, policy, critic):
    worker = start(uri)
    trained = worker.update(learn(uri, policy, critic))
    work = learn(uri, trained.model, trained.critic)
    still, moving = worker.update(replace(work, learns=False)), worker.update(work)
    assert still.model == replace(trained.model, version=2)
    assert still.critic == moving.critic
    assert still.metrics["value_loss"] == moving.metrics["value_loss"]
    assert "loss" not in still.metrics


def test_the_critics_loss_is_that_of_each_token_by_itself(uri, policy, critic):
    config = CONFIG.model_copy(update={"minibatches": 1})
    work = learn(uri, policy, critic, learns=False)
    metrics = start(uri, config).update(work).metrics
    store = open_store(f"{uri}/run")
    valuer = AutoModelForSequenceClassification.from_pretrained(fetch_bundle(store, critic.weights))
    losses, clipped = [], []
    for row in read_shard(store, work.samples[0]).to_pylist():
        states = valuer.base_model(torch.tensor([row["tokens"]])).last_hidden_state[
            0, row["num_prompt_tokens"] - 1 : -1
        ]
        values, old, returns = (
            valuer.score(states)[:, 0].detach().numpy(),
            np.array(row["values"]),
            np.array(row["returns"]),
        )
        kept = (np.clip(values, old - 0.2, old + 0.2) - returns) ** 2
        losses += np.maximum((values - returns) ** 2, kept).tolist()
        clipped += (kept > (values - returns) ** 2).tolist()
    assert metrics["value_loss"] == pytest.approx(np.mean(losses) / 2, rel=1e-5)
    assert metrics["value_clip_fraction"] == pytest.approx(np.mean(clipped))


def test_the_critic_learns_the_returns(uri, policy, critic):
    config = CONFIG.model_copy(update={"microbatch_tokens": 9999})
    unclipped = Ppo(critic=CriticConfig(learning_rate=3e-3, clip=100.0))
    worker, version = start(uri, config, algorithm=unclipped), critic
    losses = []
    for _ in range(12):
        outcome = worker.update(learn(uri, policy, version, learns=False))
        version = outcome.critic
        losses.append(outcome.metrics["value_loss"])
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("column", ["advantages", "returns"])
def test_what_is_not_finite_in_either_discards_both(uri, policy, critic, column):
    worker = start(uri)
    work = learn(uri, policy, critic)
    table = read_shard(open_store(f"{uri}/run"), work.samples[0]).replace_schema_metadata(None)
    rows = table.to_pylist()
    rows[3][column] = [float("nan")] * len(rows[3][column])
    spoilt = write_shard(
        open_store(f"{uri}/run"), pa.Table.from_pylist(rows, table.schema), kind="samples", metadata={}
    )
    outcome = worker.update(replace(work, samples=(spoilt,)))
    assert outcome.metrics["quarantined"] == 1
    assert (outcome.model, outcome.critic) == (replace(policy, version=1), replace(critic, version=1))
    after = learn(uri, outcome.model, outcome.critic)
    found, fresh = worker.update(after), start(uri).update(after)
    assert (found.model, found.critic) == (fresh.model, fresh.critic)


# ---- several ranks
def take_turns(rank: int, ranks: int, port: int, uri: str, configs: list[UpdateConfig], parents: list, name: str):
    """Estimate and update under each configuration until version 2; rank 0 notes what came out."""
    found = []
    for config, (policy, critic) in zip(configs, parents, strict=True):
        worker, outcomes = start(uri, config, rank=rank, ranks=ranks, port=port), []
        while policy.version < 2:
            estimated = worker.estimate(asked(uri, policy, critic))
            updated = worker.update(learn(uri, policy, critic))
            outcomes.append((estimated, updated))
            policy, critic = updated.model, updated.critic
        found.append(outcomes)
    # A rank without a token has nothing to say, and the others do not wait for it.
    lonely = write_rollouts(uri, prompts=1, group=1)
    one = replace(asked(uri, policy, critic), shards=(ScoredShard(rollouts=lonely, scores=lonely),))
    assert worker.estimate(one).metrics["sequences"] == 1
    torch.save(found, Path(uri, f"{name}-{rank}.pt"))


def turns(uri: str, name: str, rank: int = 0) -> list[list[tuple[Outcome, Outcome]]]:
    return torch.load(Path(uri, f"{name}-{rank}.pt"), weights_only=False)


def same_on_two_ranks(uri: str, parents: tuple[ModelVersion, ModelVersion], configs: list[UpdateConfig]) -> None:
    together(take_turns, uri, configs, [parents] * len(configs), "hot")
    hot = turns(uri, "hot")
    starts = [(updated.model, updated.critic) for ((_, updated), _) in hot]
    together(take_turns, uri, configs, starts, "cold")
    for warm, cold in zip(hot, turns(uri, "cold"), strict=True):
        assert warm[-1][0].shards == cold[-1][0].shards
        assert (warm[-1][1].model, warm[-1][1].critic) == (cold[-1][1].model, cold[-1][1].critic)
    assert [outcome.critic for _, outcome in hot[0]] == [outcome.critic for _, outcome in turns(uri, "hot", 1)[0]]


@pytest.mark.system
@pytest.mark.parametrize("slices", [1, 2])
def test_two_ranks_estimate_and_value_as_one_does_and_continue_bit_identically(uri, policy, critic, slices):
    plain = CONFIG.model_copy(update={"minibatches": 1, "max_grad_norm": 1e9})
    config = plain.model_copy(update={"sequence_parallel": slices})
    same_on_two_ranks(uri, (policy, critic), [config])
    estimated, updated = turns(uri, "hot")[0][0]
    worker = start(uri, plain)
    alone, found = columns(uri, worker.estimate(asked(uri, policy, critic))), columns(uri, estimated)
    for name in ("reference", "values"):
        for one, two in zip(alone[name], found[name], strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
    one = worker.update(learn(uri, policy, critic))
    for name in ("value_loss", "critic_grad_norm", "explained_variance", "value_clip_fraction"):
        assert updated.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4)


@pytest.mark.slow
def test_a_critic_continues_bit_identically_under_every_stage_and_precision(uri, policy, critic):
    same_on_two_ranks(
        uri, (policy, critic), [staged(stage, dtype) for dtype in ("float32", "bfloat16") for stage in range(4)]
    )
