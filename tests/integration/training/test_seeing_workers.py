"""Workers with policies that see: what is generated, estimated and learnt from prompts with images."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from infra.errors import BadInput, Damaged
from infra.store.bundles import fetch_bundle
from infra.store.shards import read_shard
from infra.store.storage import open_store
from models.config.engines import SamplingConfig, TransformersEngine
from models.config.lora import LoraConfig
from models.config.policy import SeeingScratchPolicy
from models.config.training import WarmupConfig
from models.data.examples import Example
from models.inspection.directory import inspect_directory, inspect_policy
from models.modeling.adapters import adapted_layers
from models.modeling.directory import check_directory, copy_directory
from models.modeling.initial import texts_of, write_policy
from models.modeling.policy import load_policy, load_sight
from models.records.work import EstimateWork, RolloutWork, ScoredShard, UpdateWork
from models.training import versions
from models.training.offline import Listener, imitate
from models.training.samples import open_samples
from models.training.versions import Learner
from models.vision import sight
from models.vision.parts import part_of
from models.workers.rollout import RolloutWorker
from tests.support.seeing import (
    PICTURES,
    publish_seeing,
    write_media,
    write_prompts,
    write_seen_samples,
)
from tests.support.training import DATA, publish_scratch
from tests.support.update_workers import CONFIG, UNCLIPPED, files, gradients, read, start, together
from tests.support.vision import FAMILIES, write_seeing

SHOWN = [1, 0, 2, 1, 0, 1]


@pytest.fixture
def policy(uri):
    return publish_seeing(f"{uri}/run", Path(uri, "seeing"))


def update_of(uri, policy, shown=SHOWN) -> UpdateWork:
    return UpdateWork(
        iteration=0,
        policy=policy,
        reference=policy,
        samples=(write_seen_samples(f"{uri}/run", Path(uri, "seeing"), shown),),
        total_iterations=2,
        seed=0,
        kl_coefficient=0.1,
        media=(write_media(f"{uri}/run"),),
    )


def changed(uri, before, outcome) -> set[str]:
    old = load_policy(fetch_bundle(open_store(f"{uri}/run"), before.weights)).state_dict()
    new = load_policy(files(uri, outcome, "weights")).state_dict()
    return {part_of(name) for name, weight in new.items() if not torch.equal(weight, old[name])}


def generated(uri, policy, *, media=True):
    worker = RolloutWorker(uri, "run", TransformersEngine(), threads=1)
    return worker.generate(
        RolloutWork(
            iteration=0,
            policy=policy,
            prompts=write_prompts(f"{uri}/run", Path(uri, "seeing"), SHOWN),
            rows=tuple(range(len(SHOWN))),
            group_size=3,
            sampling=SamplingConfig(max_new_tokens=6, temperature=0.9),
            seed=0,
            media=(write_media(f"{uri}/run"),) if media else (),
        )
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_reference_says_of_rollouts_what_the_engine_said(uri, kind):
    policy = publish_seeing(f"{uri}/run", Path(uri, "seeing"), kind)
    rollouts = generated(uri, policy)
    asked = EstimateWork(
        iteration=0,
        shards=(ScoredShard(rollouts.shards[0], rollouts.shards[0]),),
        policy=policy,
        reference=policy,
        media=(write_media(f"{uri}/run"),),
    )
    store = open_store(f"{uri}/run")
    estimates = read_shard(store, start(uri).estimate(asked).shards[0])
    table = read_shard(store, rollouts.shards[0])
    assert table["images"].to_pylist()[0] == [next(iter(PICTURES))]
    expected, found = (
        np.concatenate([np.array(row) for row in column.to_pylist()])
        for column in (table["logprobs"], estimates["reference"])
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_prompts_with_images_whose_shards_are_not_named_are_damage(uri, policy):
    with pytest.raises((Damaged, AssertionError)):
        generated(uri, policy, media=False)
    with pytest.raises(Damaged, match="found none that has it"):
        start(uri).update(replace(update_of(uri, policy), media=()))


def test_an_update_moves_tower_projector_and_decoder_and_repeats_itself(uri, policy):
    work, worker = update_of(uri, policy), start(uri)
    first = worker.update(work)
    assert changed(uri, policy, first) == {"vision", "projector", "language"}
    assert start(uri).update(work).model == first.model
    names = {path.name for path in files(uri, first, "weights").iterdir()}
    assert "preprocessor_config.json" in names


@pytest.mark.parametrize("part", ["vision", "projector", "language"])
def test_a_frozen_part_stays_as_it_is(uri, policy, part):
    outcome = start(uri, CONFIG.model_copy(update={"freeze": (part,)})).update(update_of(uri, policy))
    assert changed(uri, policy, outcome) == {"vision", "projector", "language"} - {part}


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl", "gemma3"])
def test_a_tower_that_is_not_trained_reads_an_image_once_and_the_update_is_the_same(uri, monkeypatch, kind):
    policy, config = publish_seeing(f"{uri}/run", Path(uri, "seeing"), kind), UNCLIPPED
    work, frozen = update_of(uri, policy), config.model_copy(update={"freeze": ("vision", "projector")})
    calls, read = [], sight._read
    monkeypatch.setattr(sight, "_read", lambda *arguments: calls.append(0) or read(*arguments))
    worker = start(uri, frozen)
    first = worker.update(work)
    assert len(calls) == 2 * len(PICTURES)  # once by the policy and once by the reference, though there are more passes
    later = replace(work, policy=first.model, iteration=1)
    second = worker.update(later)
    assert len(calls) == 2 * len(PICTURES)
    assert start(uri, frozen).update(later).model == second.model  # who has nothing in memory learns the same bits
    with monkeypatch.context() as patch:
        patch.setattr(versions, "learns_to_see", lambda _: True)
        again = start(uri, frozen).update(work)
    np.testing.assert_allclose(gradients(uri, first), gradients(uri, again), atol=1e-6)


def test_passes_are_filled_by_patches_where_the_tower_reads_them(uri, policy):
    work = update_of(uri, policy)
    samples = open_samples(open_store(f"{uri}/run"), work.samples)
    budget = len(samples.lengths) * max(samples.lengths)  # of a pass that has all tokens
    passes, counted = {}, {}
    for freeze in ((), ("vision",), ("vision", "projector")):
        worker = start(uri, UNCLIPPED.model_copy(update={"microbatch_tokens": budget, "freeze": freeze}))
        [step] = worker._steps(work, samples)
        passes[len(freeze)] = [batch.reads for batch in step.batches]
        counted[len(freeze)] = samples.sequences(worker._joined().image_tokens(policy)).patches
    assert counted[0] == counted[1] == tuple(36 * shown for shown in SHOWN for _ in range(3))
    assert not any(counted[2])
    assert len(passes[0]) == len(passes[1]) > len(passes[2]) == 1
    for batch in passes[0]:
        shown = {(each.prompt.tobytes(), each.images) for each in batch.inputs}
        assert batch.tokens_BT.size + 36 * sum(len(images) for _, images in shown) <= budget


def test_freezing_the_tower_of_a_policy_that_has_none_is_refused(uri):
    policy = publish_scratch(f"{uri}/run", Path(uri, "scratch"))
    publish_seeing(f"{uri}/run", Path(uri, "seeing"))
    with pytest.raises(BadInput, match=r"update\.freeze 'vision': LlamaForCausalLM has no such part"):
        start(uri, CONFIG.model_copy(update={"freeze": ("vision",)})).update(update_of(uri, policy))


@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_of_all_linear_layers_leave_tower_and_projector_alone(tmp_path, kind):
    layers = adapted_layers(load_policy(write_seeing(tmp_path, kind)), LoraConfig())
    assert layers and {part_of(name) for name in layers} == {"language"}


def test_adapters_learn_while_tower_and_projector_stay(uri, policy):
    config, work = CONFIG.model_copy(update={"lora": LoraConfig(rank=4)}), update_of(uri, policy)
    first = start(uri, config).update(work)
    assert first.model.weights == policy.weights
    assert files(uri, first, "adapter") and first.metrics["grad_norm_mean"] > 0
    assert start(uri, config).update(work).model == first.model


def take_seen(rank: int, ranks: int, port: int, uri: str, configs: list, works: list, name: str):
    found = [
        [start(uri, config, rank=rank, ranks=ranks, port=port).update(work)]
        for config, work in zip(configs, works, strict=True)
    ]
    torch.save(found, Path(uri, f"{name}-{rank}.pt"))


@pytest.mark.system
@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl"])
def test_two_ranks_of_which_one_has_text_alone_learn_what_one_does(uri, kind):
    policy = publish_seeing(f"{uri}/run", Path(uri, "seeing"), kind)
    work = update_of(uri, policy, [0, 1])  # whole groups go to ranks: one has no image
    stages = [UNCLIPPED.model_copy(update={"zero_stage": stage}) for stage in (0, 1, 2, 3)]
    together(take_seen, uri, stages, [work] * len(stages), "seen")
    plain, *sharded = (outcomes[0] for outcomes in read(uri, "seen"))
    alone = start(uri, UNCLIPPED).update(work)
    np.testing.assert_allclose(gradients(uri, plain), gradients(uri, alone), atol=1e-6)
    expected, *others = (load_file(files(uri, each, "weights") / "model.safetensors") for each in (plain, *sharded))
    for name, tensor in expected.items():
        if name.endswith("k_proj.bias"):  # no softmax depends on it: its gradient is rounding alone
            continue
        for found in others:
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


# ---- warm-up, and where policies come from


def test_warm_up_imitates_examples_with_images(uri, policy):
    directory = fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    encoded = [*PICTURES.values()]
    examples = [Example("How many red?", f"#### {row % 4}", (encoded[row % 4],)) for row in range(4 * 150)]
    from models.modeling.logprobs import TokenLogprobs
    from models.records.media import HeldImages

    ranks = start(uri)._joined().ranks
    sight = load_sight(directory, source=HeldImages(PICTURES))
    learner = Learner(
        open_store(f"{uri}/run"),
        lambda _: TokenLogprobs(load_policy(directory), temperature=1.0, sight=sight),
        CONFIG,
        ranks=ranks,
    )
    warmup = WarmupConfig(steps=150, batch_size=4, learning_rate=3e-3)
    learnt = imitate(
        learner.begin_at(policy),
        examples,
        warmup=warmup,
        directory=directory,
        microbatch_tokens=2000,
        ranks=ranks,
        listener=Listener(lambda: None),
    )
    assert learnt.metrics["loss_last"] < 0.1 < learnt.metrics["loss_first"]


def test_a_policy_that_sees_built_from_nothing_is_what_was_described_and_loads_elsewhere(tmp_path):
    policy = SeeingScratchPolicy()
    described = inspect_policy(policy, texts_of(DATA, 0))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    parameters = write_policy(policy, tmp_path / "one", texts=texts_of(DATA, 0), seed=3)
    assert parameters == described.shape.parameters
    found = inspect_directory(tmp_path / "one")
    assert (found.shape, found.outline) == (described.shape, described.outline)
    copy_directory(tmp_path / "one", tmp_path / "two")
    assert check_directory(tmp_path / "two")[2] == parameters
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "two")
    assert type(model).__name__ == "Idefics3ForConditionalGeneration"
    sight = load_sight(tmp_path / "two")
    assert sight.processor.prepare(next(iter(PICTURES.values()))).tokens == 9


def test_a_policy_that_sees_built_from_nothing_begins_as_widely_spread_as_its_settings_say(tmp_path):
    policy = SeeingScratchPolicy.model_validate({"tower": {"initial_std": 0.3}, "decoder": {"initial_std": 0.05}})
    write_policy(policy, tmp_path, texts=texts_of(DATA, 0), seed=3)
    for name, weight in load_policy(tmp_path).named_parameters():
        if weight.ndim > 1:
            spread = 0.3 if part_of(name) == "vision" else 0.05
            assert weight.std().item() == pytest.approx(spread, rel=0.1), name


def test_a_critic_of_a_policy_that_sees_is_refused(tmp_path):
    found = inspect_directory(write_seeing(tmp_path, "idefics3"))
    with pytest.raises(BadInput, match="no critic and no reward model is made of a idefics3, which sees"):
        found.critic()
