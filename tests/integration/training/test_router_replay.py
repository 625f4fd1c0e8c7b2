"""Router replay: passes of training choose the experts that the rollout noted, and weigh them by their own logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, GptOssConfig, MiniMaxM2Config, Qwen2MoeConfig

from infra.errors import BadInput, Damaged
from infra.store.bundles import publish_bundle
from infra.store.shards import ShardRef, read_shard, write_shard
from infra.store.storage import open_store
from models.config.algorithms import Distillation, DistillationOnly
from models.config.engines import SamplingConfig
from models.config.lora import LoraConfig
from models.config.rollout import PartialRollout
from models.config.teachers import TeacherDirectory
from models.modeling.experts import heard_choices, routers
from models.modeling.layout import lay_out
from models.modeling.logprobs import TokenLogprobs
from models.modeling.policy import load_policy
from models.modeling.replayed_experts import can_replay
from models.records.model_input import ModelInput, expert_lists, rollout_inputs
from models.records.schemas import EXPERTS, SAMPLE_SCHEMA, FinishReason
from models.records.versions import ModelVersion
from models.records.work import EstimateWork, ScoredShard
from models.workers.update import UpdateWorker
from tests.support.engines import MIXED, engine_of
from tests.support.policies import ARCHITECTURES, DECODER, write_policy
from tests.support.processes import preload
from tests.support.rollout_workers import example, worker
from tests.support.update_workers import UNCLIPPED, free_port, gradients, read, start, together, work

preload(__name__)

CPU = torch.device("cpu")

SIZES = {**DECODER, "num_hidden_layers": 2}

FAMILIES = {
    "mixtral": ARCHITECTURES["mixtral"],
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
    "qwen2_moe": (
        Qwen2MoeConfig,
        {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "initializer_range": 0.1},
    ),
    "gpt_oss": (GptOssConfig, {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.1}),
    "minimax_m2": (MiniMaxM2Config, {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 2}),
}


@pytest.fixture(params=FAMILIES)
def kind(request, monkeypatch) -> str:
    monkeypatch.setitem(ARCHITECTURES, request.param, FAMILIES[request.param])
    return request.param


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model's weights so that its routers would choose otherwise."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in routers(model):
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator) * 0.3)
    return model


def rolled_out(directory: Path) -> list[tuple[ModelInput, tuple[float, ...]]]:
    """Sample completions and note the experts; what models read of each, and its log-probs."""
    engine = engine_of(directory)
    engine.note_experts(True)
    groups = engine.generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    return [
        (given.continued(completion.tokens).routed(completion.experts), completion.logprobs)
        for asked, group in zip(MIXED, groups, strict=True)
        for given, completion in zip(asked.inputs, group, strict=True)
    ]


def chosen_by(module: TokenLogprobs, inputs: list[ModelInput]) -> list[np.ndarray]:
    """What the routers of a module choose in a padded pass, of all tokens of each input but the last."""
    module.shares_prompts = False
    batch = lay_out(inputs)
    with torch.no_grad(), heard_choices(module.model) as heard:
        module(module.read(batch, CPU))
    chosen_BTF = heard.of_pass().reshape(*batch.tokens_BT.shape, -1)
    return [chosen_TF[: len(each) - 1] for chosen_TF, each in zip(chosen_BTF, inputs, strict=True)]


def test_the_trainer_chooses_the_very_experts_of_the_rollout_and_says_its_log_probs(kind, tmp_path):
    write_policy(tmp_path, kind)
    pairs = rolled_out(tmp_path)
    inputs, noted = [each for each, _ in pairs], [each.experts for each, _ in pairs]
    module = TokenLogprobs(load_policy(tmp_path), temperature=0.8, replays_experts=True)
    with torch.no_grad():
        found_N = module(module.read(lay_out(inputs), CPU))
    assert found_N.tolist() == pytest.approx([each for _, logprobs in pairs for each in logprobs], abs=1e-5)
    alone = chosen_by(TokenLogprobs(load_policy(tmp_path), temperature=0.8), inputs)
    assert all(np.array_equal(*both) for both in zip(alone, noted, strict=True))
    assert len(np.unique(np.concatenate(noted), axis=0)) > 2


def forced(model: torch.nn.Module, chosen_LF: torch.Tensor) -> None:
    """Have routers take these experts, by each family's own formula written out once more."""
    top = routers(model)[0].top_k

    def forward(router, states, *bias, number):
        states = states.reshape(-1, states.shape[-1])
        logits_LE = F.linear(states, router.weight, getattr(router, "bias", None))
        chosen_LK = chosen_LF[:, number * top : (number + 1) * top].long()
        match type(router).__name__:
            case "MixtralTopKRouter":
                weights = torch.gather(logits_LE.float().exp() / logits_LE.float().exp().sum(-1, True), 1, chosen_LK)
                weights = weights / weights.sum(-1, True)
            case "Qwen3MoeTopKRouter" | "Qwen2MoeTopKRouter":  # whose configuration here does not normalise
                assert not router.norm_topk_prob
                weights = logits_LE.float().exp() / logits_LE.float().exp().sum(-1, True)
                weights = torch.gather(weights, 1, chosen_LK).to(logits_LE.dtype)
            case "GptOssTopKRouter":
                weights = torch.gather(logits_LE, 1, chosen_LK).exp()
                weights = weights / weights.sum(-1, True)
            case "MiniMaxM2TopKRouter":
                weights = torch.gather(1 / (1 + (-logits_LE.float()).exp()), 1, chosen_LK)
                weights = weights / weights.sum(-1, True)
        return logits_LE, weights, chosen_LK

    for number, router in enumerate(routers(model)):
        router.forward = lambda *read, number=number, router=router: forward(router, *read, number=number)


@pytest.mark.parametrize("shares", [False, True])
def test_a_moved_policy_computes_what_the_noted_experts_say_and_learns_through_them(kind, shares, tmp_path):
    """In float64, but for what families compute in float32 anyway: states and every gradient. The plain model has
    no interception, no sharing, and one row a pass."""
    write_policy(tmp_path, kind)
    inputs = [each for each, _ in rolled_out(tmp_path)][2:9]
    model, plain = (
        moved(AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").double()) for _ in range(2)
    )
    module = TokenLogprobs(model, temperature=1.0, replays_experts=True)
    module.shares_prompts &= shares
    read = module.read(lay_out(inputs), CPU)
    assert (read.shared is not None) == module.shares_prompts
    module.replay.begin(read.chosen_LF)
    states_NH = module.states(read)
    signs_H = torch.randn(states_NH.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (states_NH.tanh() @ signs_H).sum().backward()
    expected = []
    for each in inputs:
        forced(plain, torch.from_numpy(np.pad(each.experts.astype(np.int64), ((0, 1), (0, 0)))))
        said_TH = plain.base_model(torch.from_numpy(each.tokens[None].astype(np.int64)), use_cache=False)[0][0]
        expected.append(said_TH[each.written - 1])
    expected_NH = torch.cat(expected)
    (expected_NH.tanh() @ signs_H).sum().backward()
    torch.testing.assert_close(states_NH, expected_NH, rtol=1e-5, atol=1e-6)
    others = dict(plain.named_parameters())
    for name, parameter in model.base_model.named_parameters(prefix=model.base_model_prefix):
        torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-4, atol=1e-5)
    alone = chosen_by(TokenLogprobs(moved(load_policy(tmp_path)), temperature=1.0), inputs)
    assert any((own != each.experts).any() for own, each in zip(alone, inputs, strict=True))


# ---- whole updates

REPLAYING = UNCLIPPED.model_copy(update={"router_replay": "rollout", "router_loss": 0.5})

SMALL = REPLAYING.model_copy(update={"microbatch_tokens": 60})


def published(uri: str, kind: str = "mixtral") -> ModelVersion:
    write_policy(Path(uri, kind), kind)
    return ModelVersion(version=0, weights=publish_bundle(open_store(f"{uri}/run"), Path(uri, kind), prefix="policies"))


def routed_samples(uri: str, plain: ShardRef, *, ways: int, width: tuple[int, int] = (3, 2)) -> ShardRef:
    """Samples with random experts; prompts of a group were routed in so many ways."""
    store = open_store(f"{uri}/run")
    table, rng = read_shard(store, plain, SAMPLE_SCHEMA.names).replace_schema_metadata(None), np.random.default_rng(3)
    numbers, top = width

    def some(tokens: int) -> np.ndarray:
        return rng.permuted(np.tile(np.arange(6), (tokens, numbers, 1)), axis=2)[:, :, :top].reshape(tokens, -1)

    prompts, rows = {}, []
    for row in table.select(["prompt_row", "sample", "num_prompt_tokens", "tokens"]).to_pylist():
        begin = prompts.setdefault((row["prompt_row"], row["sample"] % ways), some(row["num_prompt_tokens"]))
        rows.append(np.concatenate([begin, some(len(row["tokens"]) - len(begin))])[: len(row["tokens"]) - 1])
    column = expert_lists(np.concatenate(rows).astype(np.uint8), np.array([len(each) for each in rows]))
    return write_shard(store, table.append_column(EXPERTS, column), kind="samples", metadata={})


def replayed_work(uri: str, policy: ModelVersion, *, ways: int = 2, **changes):
    asked = work(uri, policy)
    return replace(asked, samples=(routed_samples(uri, asked.samples[0], ways=ways, **changes),))


def test_neither_the_size_of_a_pass_nor_recomputing_layers_changes_what_is_learnt_from_a_replay(uri):
    policy = published(uri)
    asked = replayed_work(uri, policy)
    small, large, again = (
        start(uri, config).update(asked)
        for config in (
            SMALL,
            REPLAYING.model_copy(update={"microbatch_tokens": 9999}),
            SMALL.model_copy(update={"activation_checkpointing": True}),
        )
    )
    assert small.metrics == pytest.approx(large.metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradients(uri, small), gradients(uri, large), atol=2e-6)
    assert again.model.weights == small.model.weights
    chosen = start(uri, UNCLIPPED.model_copy(update={"router_loss": 0.5})).update(replace(asked, samples=asked.samples))
    assert np.abs(gradients(uri, chosen) - gradients(uri, large)).max() > 1e-4


def test_a_reference_chooses_itself_whether_it_is_a_model_or_the_policy_without_adapters(uri):
    policy = published(uri)
    asked = replayed_work(uri, policy)
    whole, adapted = (
        start(uri, REPLAYING.model_copy(update={"lora": lora})).update(asked).metrics for lora in (None, LoraConfig())
    )
    assert whole["kl"] > 1e-6  # of the same weights: what is replayed is all that differs
    assert adapted["kl"] == pytest.approx(whole["kl"], rel=1e-2)


def take_one(rank: int, ranks: int, port: int, uri: str, asked, config) -> None:
    """Update a policy once; rank 0 notes the outcome."""
    outcome = start(uri, config, rank=rank, ranks=ranks, port=port).update(asked)
    torch.save([[outcome]], Path(uri, f"one-{rank}.pt"))


@pytest.mark.system
def test_two_ranks_learn_the_same_from_a_replay_as_one_does(uri):
    policy = published(uri)
    asked = replayed_work(uri, policy)
    together(take_one, uri, asked, SMALL)
    [[found]] = read(uri, "one")
    alone = start(uri, REPLAYING.model_copy(update={"microbatch_tokens": 9999})).update(asked)
    assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradients(uri, found), gradients(uri, alone), atol=2e-6)


@pytest.mark.system
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_share_weights_learn_the_same_from_a_replay(uri, stage):
    policy = published(uri)
    asked = replayed_work(uri, policy)
    config = SMALL.model_copy(update={"router_loss": None})
    together(take_one, uri, asked, config.model_copy(update={"zero_stage": stage}))
    [[found]] = read(uri, "one")
    alone = start(uri, config).update(asked)
    assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("width", "message"),
    [
        ((2, 2), r"sample of \d+ tokens, to be replayed: expected 6 experts of each token, below 6; found 4"),
        (None, r"sample of \d+ tokens, to be replayed: expected 6 experts of each token, below 6; found none"),
    ],
)
def test_samples_without_the_experts_of_the_policys_routers_are_damaged(uri, width, message):
    policy = published(uri)
    asked = work(uri, policy) if width is None else replayed_work(uri, policy, width=width)
    with pytest.raises(Damaged, match=message):
        start(uri, SMALL).update(asked)


# ---- rollouts that are cut, and taken up by others


@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_a_completion_that_goes_on_keeps_the_experts_of_what_was_written_before(kind, tmp_path):
    store = open_store(str(tmp_path / "run"))
    asked = replace(example(store, tmp_path / "dense"), policy=published(str(tmp_path), kind), notes_experts=True)
    whole = worker(tmp_path).generate(asked)
    table = read_shard(store, whole.shards[0])
    expected = {(row["prompt_row"], row["sample"]): row for row in table.to_pylist()}
    assert all(len(each.experts) == len(each) - 1 for each in rollout_inputs(table))
    cut = worker(tmp_path).generate(replace(asked, partial=PartialRollout(tokens=6)))  # whose worker then is gone
    begun = read_shard(store, cut.shards[1])
    assert FinishReason.CUT in begun["finish_reason"].to_pylist()
    on = replace(asked, iteration=4, rows=(), continued=cut.shards[1])
    for policy, same in ((asked.policy, True), (moved_policy(tmp_path, store), False)):
        [ended] = worker(tmp_path).generate(replace(on, policy=replace(policy, version=1))).shards
        rows = read_shard(store, ended).to_pylist()
        assert len(rows) == begun.num_rows
        for row, before in zip(rows, begun.to_pylist(), strict=True):
            assert row[EXPERTS][: len(before[EXPERTS])] == before[EXPERTS]
            assert len(row[EXPERTS]) == len(row["prompt_tokens"]) + len(row["completion_tokens"]) - 1
            if same:
                assert row[EXPERTS] == expected[row["prompt_row"], row["sample"]][EXPERTS]


def moved_policy(home: Path, store) -> ModelVersion:
    write_policy(home / "moved", "mixtral", seed=7)
    return ModelVersion(version=1, weights=publish_bundle(store, home / "moved", prefix="policies"))


def test_a_rollout_that_is_to_note_experts_of_a_dense_policy_is_refused(tmp_path):
    asked = replace(example(open_store(str(tmp_path / "run")), tmp_path / "dense"), notes_experts=True)
    with pytest.raises(BadInput, match="expected experts and routers for them, to be noted, found dense layers"):
        worker(tmp_path).generate(asked)


@pytest.mark.parametrize(("name", "fits"), [("mixtral", True), ("phimoe", False)])
def test_families_that_choose_otherwise_are_told_from_those_that_can_be_replayed(name, fits):
    from transformers import CONFIG_MAPPING

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes, num_key_value_heads=2))
    assert routers(model)
    assert can_replay(model) == fits


@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_a_policy_that_is_asked_about_rollouts_replays_them_and_its_teacher_chooses_itself(kind, tmp_path):
    """Teacher and policy have the same weights: those that rolled out, then others."""
    store = open_store(str(tmp_path / "run"))
    wrote = published(str(tmp_path), kind)
    asked = replace(example(store, tmp_path / "dense"), policy=wrote, notes_experts=True)
    [rollouts] = worker(tmp_path).generate(asked).shards
    algorithm = DistillationOnly(distillation=Distillation(teacher=TeacherDirectory(path=tmp_path)))
    learner = UpdateWorker(str(tmp_path), "run", update=SMALL, algorithm=algorithm, temperature=1.0, threads=1)
    learner.join(0, 1, "127.0.0.1", free_port())
    shards, found = (ScoredShard(rollouts, rollouts),), []
    for version in (wrote, moved_policy(tmp_path, store)):
        made = learner.estimate(EstimateWork(iteration=1, shards=shards, policy=version, teacher=version))
        said = read_shard(store, made.shards[0])
        found.append([np.concatenate(said[name].to_pylist()) for name in ("policy", "teacher")])
    sampled = np.concatenate(read_shard(store, rollouts)["logprobs"].to_pylist())
    for said in found[0]:
        np.testing.assert_allclose(said, sampled, atol=1e-5)
    assert np.abs(found[1][0] - found[1][1]).max() > 1e-4
