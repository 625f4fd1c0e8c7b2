"""Policies with images: what workers generate, estimate and train on, and which teachers fit such a policy."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import DistillationOnly
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.config.images import PixelLimits
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.teachers import Distillation, TeacherDirectory
from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.data.examples import Example
from rheostat.models.data.problems import Problem
from rheostat.models.inspection.directory import inspect_directory, inspect_policy
from rheostat.models.inspection.images import check_teacher_images
from rheostat.models.modeling import initial
from rheostat.models.modeling.adapters import adapted_layers
from rheostat.models.modeling.directory import check_directory, copy_directory
from rheostat.models.modeling.initial import iterate_texts
from rheostat.models.modeling.policy import load_policy, load_vision
from rheostat.models.records.work import EstimateWork, RolloutWork, ScoredShard, UpdateWork
from rheostat.models.training import versions
from rheostat.models.training.offline import TrainingCallbacks
from rheostat.models.training.samples import open_samples
from rheostat.models.training.supervised import SupervisedData, encode_examples, fine_tune
from rheostat.models.training.versions import ResidentTrainer
from rheostat.models.vision import tower
from rheostat.models.vision.parts import part_of
from rheostat.models.vision.processor import load_processor
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.demos import demo_part
from tests.support.pictures import picture
from tests.support.policies import write_policy
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.seeing import (
    PICTURES,
    logits_of,
    prompts_of,
    publish_seeing,
    seen_work,
    write_media,
    write_prompts,
)
from tests.support.teachers import teacher_at
from tests.support.training import DATA, publish_scratch
from tests.support.update_workers import (
    CONFIG,
    LORA,
    UNCLIPPED,
    change,
    fetch_part,
    gradients,
    start_worker,
    update_once,
)
from tests.support.vision import FAMILIES, write_seeing

SHOWN = [1, 0, 2, 1, 0, 1]


@pytest.fixture
def policy(uri):
    return publish_seeing(f"{uri}/run", Path(uri, "seeing"))


@pytest.fixture
def work(uri, policy) -> UpdateWork:
    return seen_work(uri, policy, Path(uri, "seeing"), SHOWN)


def changed_parts(uri, before, outcome) -> set[str]:
    old = load_policy(fetch_bundle(open_store(f"{uri}/run"), before.weights)).state_dict()
    new = load_policy(fetch_part(uri, outcome, "weights")).state_dict()
    return {part_of(name) for name, weight in new.items() if not torch.equal(weight, old[name])}


def generate_shard(uri, policy, *, media=True):
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


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_reference_computes_the_log_probs_of_the_engine(uri, kind):
    policy = publish_seeing(f"{uri}/run", Path(uri, "seeing"), kind)
    rollouts = generate_shard(uri, policy)
    asked = EstimateWork(
        iteration=0,
        shards=(ScoredShard(rollouts.shards[0], rollouts.shards[0]),),
        policy=policy,
        reference=policy,
        media=(write_media(f"{uri}/run"),),
    )
    store = open_store(f"{uri}/run")
    estimates = read_shard(store, start_worker(uri).estimate(asked).shards[0])
    table = read_shard(store, rollouts.shards[0])
    assert table["images"].to_pylist()[0] == [next(iter(PICTURES))]
    expected, found = (
        np.concatenate([np.array(row) for row in column.to_pylist()])
        for column in (table["logprobs"], estimates["reference"])
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_prompts_with_images_whose_shards_are_not_named_are_damage(uri, policy, work):
    with pytest.raises((Damaged, AssertionError)):
        generate_shard(uri, policy, media=False)
    with pytest.raises(Damaged, match="missing from the media shards"):
        start_worker(uri).update(replace(work, media=()))


def test_an_update_trains_tower_projector_and_decoder_and_gives_the_same_bits_again(uri, policy, work):
    first = start_worker(uri).update(work)
    assert changed_parts(uri, policy, first) == {"vision", "projector", "language"}
    assert start_worker(uri).update(work).model == first.model
    names = {path.name for path in fetch_part(uri, first, "weights").iterdir()}
    assert "preprocessor_config.json" in names


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("part", ["vision", "projector", "language"])
def test_a_frozen_part_keeps_its_weights(uri, policy, work, part):
    outcome = start_worker(uri, change(CONFIG, freeze=(part,))).update(work)
    assert changed_parts(uri, policy, outcome) == {"vision", "projector", "language"} - {part}


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl", "gemma3"])
def test_a_frozen_tower_encodes_an_image_once_and_the_update_is_the_same(uri, monkeypatch, kind):
    policy, frozen = (
        publish_seeing(f"{uri}/run", Path(uri, kind), kind),
        change(UNCLIPPED, freeze=("vision", "projector")),
    )
    work = seen_work(uri, policy, Path(uri, kind), SHOWN)
    calls, read = [], tower._run_tower
    monkeypatch.setattr(tower, "_run_tower", lambda *arguments: calls.append(0) or read(*arguments))
    worker = start_worker(uri, frozen)
    first = worker.update(work)
    assert len(calls) == 2 * len(PICTURES)  # once by the policy and once by the reference, though there are more passes
    later = replace(work, policy=first.model, iteration=1)
    second = worker.update(later)
    assert len(calls) == 2 * len(PICTURES)
    assert start_worker(uri, frozen).update(later).model == second.model  # without the embeddings in memory
    with monkeypatch.context() as patch:
        patch.setattr(versions, "trains_vision", lambda _: True)
        again = start_worker(uri, frozen).update(work)
    np.testing.assert_allclose(gradients(uri, first), gradients(uri, again), atol=1e-6)


def test_patches_count_towards_the_size_of_a_micro_batch_if_the_tower_is_trained(uri, policy, work):
    samples = open_samples(open_store(f"{uri}/run"), work.samples)
    budget = len(samples.lengths) * max(samples.lengths)  # of a pass that has all tokens
    passes, counted = {}, {}
    for freeze in ((), ("vision",), ("vision", "projector")):
        worker = start_worker(uri, change(UNCLIPPED, microbatch_tokens=budget, freeze=freeze))
        [step] = worker._steps(work, samples)
        passes[len(freeze)] = [batch.microbatch for batch in step.batches]
        counted[len(freeze)] = samples.sequences(worker._require_models().image_tokens(policy)).patches
    assert counted[0] == counted[1] == tuple(36 * shown for shown in SHOWN for _ in range(3))
    assert not any(counted[2])
    assert len(passes[0]) == len(passes[1]) > len(passes[2]) == 1
    for batch in passes[0]:
        shown = {(each.prompt.tobytes(), each.images) for each in batch.inputs}
        assert batch.tokens_BT.size + 36 * sum(len(images) for _, images in shown) <= budget


def test_freezing_the_tower_of_a_policy_without_a_tower_is_refused(uri):
    policy = publish_scratch(f"{uri}/run", Path(uri, "scratch"))
    with pytest.raises(BadInput, match=r"update\.freeze contains 'vision', but LlamaForCausalLM"):
        update_once(uri, policy, change(CONFIG, freeze=("vision",)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_of_all_linear_layers_are_in_the_language_model_alone(tmp_path, kind):
    layers = adapted_layers(load_policy(write_seeing(tmp_path, kind)), LoraConfig())
    assert layers and {part_of(name) for name in layers} == {"language"}


@pytest.mark.thorough
def test_adapters_are_trained_while_tower_and_projector_keep_their_weights(uri, policy, work):
    config = change(CONFIG, lora=LORA)
    first = start_worker(uri, config).update(work)
    assert first.model.weights == policy.weights
    assert fetch_part(uri, first, "adapter") and first.metrics["grad_norm_mean"] > 0
    assert start_worker(uri, config).update(work).model == first.model


# ---- warm-up, and where policies come from


@pytest.mark.thorough
def test_warmup_trains_on_examples_with_images(uri, policy):
    directory = fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    encoded = [*PICTURES.values()]
    examples = [Example("How many red?", f"#### {row % 4}", (encoded[row % 4],)) for row in range(4 * 150)]
    from rheostat.models.modeling.logprobs import TokenLogprobs
    from rheostat.models.records.media import InMemoryImages

    ranks = start_worker(uri)._require_models().ranks
    vision = load_vision(directory, source=InMemoryImages(PICTURES))
    resident = ResidentTrainer(
        open_store(f"{uri}/run"),
        lambda _: TokenLogprobs(load_policy(directory), temperature=1.0, vision=vision),
        CONFIG,
        ranks=ranks,
        on_progress=lambda: None,
    )
    warmup = SupervisedWarmup(steps=150, batch_size=4, learning_rate=3e-3)
    learnt = fine_tune(
        resident.load_with_fresh_optimizer(policy),
        SupervisedData.split(encode_examples(examples, directory, rules=TextRules()), warmup),
        warmup=warmup,
        directory=directory,
        microbatch_tokens=2000,
        ranks=ranks,
        callbacks=TrainingCallbacks(lambda: None),
    )
    assert learnt.metrics["loss_last"] < 0.1 < learnt.metrics["loss_first"]


SmallVisionPolicy = demo_part("vision/scratch_vision:VisionScratchPolicy")


def test_a_vision_language_policy_from_scratch_has_the_described_sizes_and_loads_in_transformers(tmp_path):
    policy = SmallVisionPolicy()
    described = inspect_policy(policy, iterate_texts(DATA, 0))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    parameters = initial.write_policy(policy, tmp_path / "one", texts=iterate_texts(DATA, 0), seed=3)
    assert parameters == described.shape.parameters
    found = inspect_directory(tmp_path / "one")
    assert (found.shape, found.outline) == (described.shape, described.outline)
    copy_directory(tmp_path / "one", tmp_path / "two")
    assert check_directory(tmp_path / "two")[2] == parameters
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "two")
    assert type(model).__name__ == "Idefics3ForConditionalGeneration"
    vision = load_vision(tmp_path / "two")
    assert vision.processor.prepare(next(iter(PICTURES.values()))).tokens == 9


def test_a_vision_language_policy_from_scratch_has_weights_of_the_configured_spread(tmp_path):
    policy = SmallVisionPolicy.model_validate({"tower": {"initial_std": 0.3}, "decoder": {"initial_std": 0.05}})
    initial.write_policy(policy, tmp_path, texts=iterate_texts(DATA, 0), seed=3)
    for name, weight in load_policy(tmp_path).named_parameters():
        if weight.ndim > 1:
            spread = 0.3 if part_of(name) == "vision" else 0.05
            assert weight.std().item() == pytest.approx(spread, rel=0.1), name


# ---- teachers
def estimate(uri: str, kind: str, distillation: Distillation, **changes):
    """Score random completions with a teacher of other weights. Return estimates, rollouts and the teacher."""
    store = open_store(f"{uri}/run")
    names = enumerate(("seeing", "teacher"))
    policy, teacher = (publish_seeing(f"{uri}/run", Path(uri, name), kind, seed=seed) for seed, name in names)
    rng = np.random.default_rng(3)
    rows = []
    for row, each in enumerate(prompts_of(Path(uri, "seeing"), [1, 0, 1, 1])):
        written = rng.integers(20, 280, 4 + row).tolist()
        rows.append(
            rollout(row, 0, "", images=each.images, prompt_tokens=each.tokens.tolist(), completion_tokens=written)
            | {"logprobs": [-5.0] * len(written)}
        )
    shard = write_rollouts(store, *rows)
    worker = start_worker(uri, algorithm=DistillationOnly(distillation=distillation))
    work = EstimateWork(
        iteration=0,
        shards=(ScoredShard(shard, shard),),
        policy=policy,
        reference=policy,
        teacher=teacher,
        media=(write_media(f"{uri}/run"),),
    )
    made = worker.estimate(replace(work, **changes))
    return read_shard(store, made.shards[0]), rows, fetch_bundle(store, teacher.weights)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", ["idefics3", "qwen2_5_vl", "gemma3"])
def test_a_teacher_computes_the_log_probs_of_transformers_after_images(uri, kind):
    estimates, rows, directory = estimate(uri, kind, Distillation(teacher=TeacherDirectory(path=Path("elsewhere"))))
    banned = list(load_processor(directory).banned)
    for row, said in zip(rows, estimates["teacher"].to_pylist(), strict=True):
        if not row["images"]:
            continue
        prompt, completion = row["prompt_tokens"], row["completion_tokens"]
        logits_TV = logits_of(directory, [*prompt, *completion], PICTURES[row["images"][0]]) / 0.9
        logits_TV[:, banned] = -float("inf")
        logprobs_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs_TV[range(len(completion)), completion].numpy()
        np.testing.assert_allclose(said, expected, atol=2e-5)


def test_a_teacher_behind_an_endpoint_never_receives_image_tokens(uri):
    teacher = Distillation(teacher=teacher_at("http://127.0.0.1:1/v1"))
    with pytest.raises(BadInput, match="supports text only, but a prompt has images"):
        estimate(uri, "idefics3", teacher, teacher=None)


# ---- before the run

PROBLEM = Problem("a.jsonl:7", "How many?", "1", images=(picture("red", (24, 24)),))


def refusal(teacher, policy: Path, *, limits: PixelLimits | None = None) -> str:
    with pytest.raises(BadInput) as raised:
        check_teacher_images(teacher, [PROBLEM], load_processor(policy), limits=limits or PixelLimits())
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_teacher_that_encodes_images_as_the_policy_does_is_accepted(tmp_path, kind):
    policy, teacher = (write_seeing(tmp_path / name, kind) for name in ("policy", "teacher"))
    check_teacher_images(TeacherDirectory(path=teacher), [PROBLEM], load_processor(policy), limits=PixelLimits())


def test_a_teacher_without_a_vision_tower_is_refused_if_problems_have_images(tmp_path):
    policy = write_seeing(tmp_path / "policy", "idefics3")
    write_policy(tmp_path / "text")
    said = refusal(TeacherDirectory(path=tmp_path / "text"), policy)
    assert "teacher: the prompt a.jsonl:7 has images, but the teacher reads only text" in said
    said = refusal(teacher_at("http://127.0.0.1:1/v1"), policy)
    assert "which teachers behind an endpoint do not support" in said
    text = [replace(PROBLEM, images=())]
    check_teacher_images(TeacherDirectory(path=tmp_path / "text"), text, load_processor(policy), limits=PixelLimits())


def test_a_teacher_with_other_image_token_counts_is_refused_unless_pixel_limits_equalize_them(tmp_path):
    policy, teacher = (write_seeing(tmp_path / name, "qwen2_5_vl") for name in ("policy", "teacher"))
    settings = policy / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("1024", "144"))
    said = refusal(TeacherDirectory(path=teacher), policy)
    assert re.search(
        r"an image of a.jsonl:7 with 24 x 24 pixels becomes 9 tokens for the teacher but [1-4] for the policy", said
    )
    limits = PixelLimits(max_pixels=144)
    check_teacher_images(TeacherDirectory(path=teacher), [PROBLEM], load_processor(policy), limits=limits)
