"""A whole run of a text-to-image policy, and the commands that read or change the stored images."""

import json
import re
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.denoising import DenoisingConfig, LearntWindow
from rheostat.models.config.engines import DiffusersEngine
from rheostat.models.denoising import frozen_parts
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.steps import GenerationSetup, StepLogprobs
from rheostat.models.engines.image_generation import DiffusersImageEngine
from rheostat.models.engines.protocol import Request
from rheostat.models.modeling.layout import lay_out
from rheostat.models.records.media import Gallery, Media
from rheostat.models.records.model_input import ModelInput, rollout_inputs
from rheostat.models.records.versions import policy_of
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.tasks.run.batch import picture_shards_of
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.chat_server import chat_server, reply_with
from tests.support.in_process import InProcessJob
from tests.support.jobs import files_of
from tests.support.stored_runs import open_tiny
from tests.support.whole_runs import read_families

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
FAMILY = "diffusion"


def rollouts_with_pictures(run):
    """Return completions and pictures of each rollout shard, by key."""
    made = [each for each in run.manifests() if "/rollout/" in each.key]
    return {
        each.key: (read_shard(run.store, each.shards[0]), Media(run.store, picture_shards_of(each))) for each in made
    }


def test_every_completion_has_an_image_and_the_states_of_its_trained_steps(whole):
    run = open_tiny(whole)
    for key, (table, media) in rollouts_with_pictures(run).items():
        digests = [digest for images in table["images"].to_pylist() for digest in images]
        assert len({*digests}) == table.num_rows == len(media.digests), "no two drawings have one name"
        for digest, steps in zip(digests, table["completion_tokens"].to_pylist(), strict=True):
            assert (media.shown(digest).width, media.shown(digest).format) == (64, "PNG")
            if key.startswith("eval"):
                assert steps == [*range(8)], "an evaluation has its own number of steps, and learns from none"
            else:
                assert len(steps) == 2 and steps[0] in range(3)
                assert media.states(digest, steps=2).shape == (3, 3 * 8 * 8)
    windows: dict[str, set[tuple[int, ...]]] = {}
    for key, (table, _) in rollouts_with_pictures(run).items():
        windows.setdefault(key[:7], set()).update(map(tuple, table["completion_tokens"].to_pylist()))
    assert {len(windows[f"it-000{number}"]) for number in (1, 2)} == {1}, "an iteration has one window"


def test_an_update_reports_the_log_ratio_of_each_trained_step(whole):
    run = open_tiny(whole)
    for number in (1, 2):
        table, _ = rollouts_with_pictures(run)[f"it-000{number}/rollout/0000"]
        learnt, told = {*table["completion_tokens"].to_pylist()[0]}, run.require(f"it-000{number}/update").metrics
        assert {int(name.rpartition("_")[2]) for name in told if name.startswith("log_ratio_mean_step")} == learnt
        assert all(told[f"log_ratio_std_step_{step}"] > 0 for step in learnt)


def test_the_prefect_summary_and_the_report_show_generated_images(whole, job):
    run = open_tiny(whole)
    drawn = {digest for _, media in rollouts_with_pictures(run).values() for digest in media.digests}
    pages = [each["data"] for each in json.loads((whole.home / "artifacts.json").read_text())]
    images = [{*re.findall(r"!\[image (\w{16})\]\(data:image/png;base64,", page)} for page in pages]
    known = {digest[:16] for digest in drawn}
    own = [each for each in images if each & known]  # others are of other runs
    assert own and all(each <= known for each in own)
    assert job.command("report", "--to", str(job.home / "page.html")).code == 0
    told = (job.home / "page.html").read_text()
    assert sum(digest in told for digest in drawn) > 16 and "data:image/png;base64," in told


def test_verify_accepts_the_run(whole):
    assert checker.problems_of(whole.run) == []
    assert verify_run(str(whole.store), "tiny") == []


@pytest.mark.parametrize("size", [1, 5, 16])
def test_before_the_first_step_the_ratio_is_1_for_any_micro_batch_size(whole, size):
    """The trainer reads exactly the states that the engine wrote. DanceGRPO's author recommends to check this first."""
    run = open_tiny(whole)
    version = policy_of(run.require(StageKey.policy(0)))
    directory = fetch_bundle(run.store, version.weights)
    config = DenoisingConfig(steps=6, window=LearntWindow(size=2, first=0, last=2), text_tokens=1)
    gallery, compared = Gallery(), 0
    module = StepLogprobs(
        load_denoiser(directory), GenerationSetup.load(directory, config, FrozenParts(device="cpu")), gallery
    )
    for key, (table, media) in rollouts_with_pictures(run).items():
        if not key.startswith("it-0001"):
            continue
        gallery.source = media
        inputs, behaviour = rollout_inputs(table), np.concatenate(table["logprobs"].to_pylist()).astype(np.float32)
        said = []
        for start in range(0, len(inputs), size):
            with torch.no_grad():
                said.append(module(module.prepare_inputs(lay_out(inputs[start : start + size]), torch.device("cpu"))))
        ratios = (torch.cat(said) - torch.from_numpy(behaviour)).exp()
        assert (ratios - 1).abs().max() <= 1e-6
        compared += len(ratios)
    assert compared == 4 * 4 * 2


def test_an_image_does_not_depend_on_its_batch(whole):
    run = open_tiny(whole)
    version = policy_of(run.require(StageKey.policy(0)))
    table, media = rollouts_with_pictures(run)["it-0001/rollout/0000"]
    row = rollout_inputs(table)[5]
    engine = DiffusersImageEngine(DiffusersEngine())
    engine.load(fetch_bundle(run.store, version.weights), version)
    request = Request(row=0, inputs=(type(row)(row.chunks[:1]),), seeds=(table["seed"][5].as_py(),))
    first = int(row.completion[0])
    [[alone]] = engine.generate_images([request], DenoisingConfig(steps=6, text_tokens=1), range(first, first + 2))
    stored = media.states(row.images[0], steps=2)
    assert np.abs(alone.picture.states - stored).max() <= 1e-5
    assert alone.tokens == tuple(row.completion)


def test_text_encoders_are_loaded_once_for_all_policy_versions(whole, monkeypatch):
    """Text encoders of real policies are larger than the trained weights.

    Their memory is released when the engine sleeps.
    """
    loaded = []
    reader = frozen_parts.PromptEncoder
    monkeypatch.setattr(frozen_parts, "PromptEncoder", lambda *of, **named: loaded.append(of) or reader(*of, **named))
    run = open_tiny(whole)
    table, _ = rollouts_with_pictures(run)["it-0001/rollout/0000"]
    read = rollout_inputs(table)[0]
    request = Request(row=0, inputs=(type(read)(read.chunks[:1]),), seeds=(3,))
    versions = [policy_of(run.require(key)) for key in (StageKey.policy(0), "it-0001/update", "it-0002/update")]
    engine, drawn = DiffusersImageEngine(DiffusersEngine()), []
    for version in versions:
        engine.load(fetch_bundle(run.store, version.weights), version)
        for steps in (6, 8):
            [[one]] = engine.generate_images([request], DenoisingConfig(steps=steps, text_tokens=1), range(0))
            drawn.append(one.picture.encoded)
    assert len(loaded) == 1
    engine.sleep()
    engine.load(fetch_bundle(run.store, versions[0].weights), versions[0])
    [[again]] = engine.generate_images([request], DenoisingConfig(steps=6, text_tokens=1), range(0))
    assert len(loaded) == 2 and again.picture.encoded == drawn[0] != drawn[2]


def test_rescore_accepts_stored_images(job):
    rewards = "rewards=[{kind='target',target='painting:painting'}]"
    assert job.command("rescore", "--rewards", rewards, "--as", "again", "pools.cluster=threads").code == 0
    assert job.command("verify").code == 0


def test_forgetting_a_prompt_deletes_its_images(job, tmp_path):
    run = open_tiny(job)
    table, media = rollouts_with_pictures(run)["it-0001/rollout/0000"]
    prompt, [digest] = table["prompt_id"][0].as_py(), table["images"][0].as_py()
    picture = media.encoded(digest)
    assert any(picture in content for content in files_of(job.run).values())
    (tmp_path / "ids").write_text(f"{prompt}\n")
    assert job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete").code == 0
    assert not [name for name, content in files_of(job.run).items() if picture in content]
    assert job.command("verify").code == 0


def test_rescore_passes_stored_images_to_a_judge_and_sums_several_rewards(job):
    """Judge by the size of the received image file: 1 if it is larger than the median."""
    run = open_tiny(job)
    sizes = sorted(
        media.shown(digest).bytes for _, media in rollouts_with_pictures(run).values() for digest in media.digests
    )
    median = sizes[len(sizes) // 2]

    def weighs(asked, before):
        [image] = asked.images
        return reply_with(f"{len(image)} bytes" if "colour" in asked.text else "yes" if len(image) > median else "no")

    with chat_server(weighs) as server:
        where = f"base_url='{server.url}', allowed_hosts=['127.0.0.1'], allow_private=true"
        model = f"{{kind='endpoint', model='j', {where}}}"
        judge = f"{{kind='judge', images='prompt', verdict={{kind='choice', constrained=false}}, model={model}}}"
        bright = "{kind='target', target='tests.support.rewards:brightness', weight=0.5}"
        rewards = f"rewards=[{judge}, {bright}]"
        ended = job.command("rescore", "--rewards", rewards, "--as", "judged", "pools.cluster=threads")
    assert ended.code == 0, ended.output
    judged = 0
    for key, (table, media) in rollouts_with_pictures(run).items():
        if key.startswith("eval"):
            continue
        scores = read_shard(run.store, run.require(f"rescore/judged/{key.replace('rollout', 'scoring')}").shards[0])
        for [digest], total, verdict, bright in zip(
            table["images"].to_pylist(),
            *(scores[name].to_pylist() for name in ("reward", "reward_judge", "reward_target")),
            strict=True,
        ):
            assert verdict == float(len(media.encoded(digest)) > median)
            assert total == pytest.approx(verdict + 0.5 * bright)
            judged += 1
    assert judged == 2 * 4 * 4
    assert job.command("verify").code == 0


def test_an_exported_policy_generates_the_same_image_in_the_pipeline_of_diffusers(whole, tmp_path):
    from diffusers import StableDiffusion3Pipeline

    target = tmp_path / "policy"
    exported = whole.command("export-policy", "--to", str(target))
    assert exported.code == 0, exported.output
    run = open_tiny(whole)
    version = policy_of(run.require("it-0002/update"))
    engine = DiffusersImageEngine(DiffusersEngine())
    engine.load(target, version)
    prompt = "red square left"
    read = ModelInput.from_prompt([*engine_tokens(target, prompt)])
    config = DenoisingConfig(steps=8, text_tokens=1)
    [[drawn]] = engine.generate_images([Request(row=0, inputs=(read,), seeds=(5,))], config, range(0))
    noise = np.random.Generator(np.random.Philox(5)).standard_normal(3 * 8 * 8, dtype=np.float32)
    pipe = StableDiffusion3Pipeline.from_pretrained(target, vae=None, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    latents = torch.from_numpy(noise).view(1, 3, 8, 8)
    options = {"num_inference_steps": 8, "guidance_scale": 1.0, "output_type": "latent", "max_sequence_length": 1}
    [expected] = pipe(prompt, latents=latents, **options).images
    shown = np.asarray(Image.open(BytesIO(drawn.picture.encoded)), np.float32)[::8, ::8].transpose(2, 0, 1)
    assert np.abs(shown - (expected.numpy() / 2 + 0.5).clip(0, 1) * 255).max() <= 1


def engine_tokens(directory, text):
    return load_tokenizer(directory)(text)["input_ids"]


@pytest.mark.parametrize(
    "changed",
    [
        ("update.zero_stage=2",),
        ("update.zero_stage=3", "update.activation_checkpointing=true"),
        ("update.lora={rank=2}", "update.kl={kind='k3', coefficient=0.01}"),
        ("update.kl={kind='k3', coefficient=0.01}", "algorithm={kind='grpo', std='batch', advantage_clip=5}"),
        ("rollout.denoising={steps=6, sampler={kind='ode'}, text_tokens=1}", "update.loss={kind='diffusion_nft'}"),
        ("rollout.denoising={steps=6, sampler={kind='sde'}, guidance=2.0, text_tokens=1}",),
        ("rollout.denoising={steps=6, sampler={kind='dance'}, text_tokens=1}", "update.dtype=bfloat16"),
    ],
    ids=["zero2", "zero3", "lora-kl", "kl-batch-std", "nft", "sde-guidance", "dance-bfloat16"],
)
def test_a_diffusion_policy_trains_with_other_parallelism_precision_and_samplers(
    changed, tmp_path, together, prefect_api
):
    job = InProcessJob(tmp_path, prefect_api)
    keys = {each.partition("=")[0] for each in changed}
    settings = read_families()["diffusion"].settings(together)
    job.train(*(each for each in settings if each.partition("=")[0] not in keys), *changed)
    assert verify_run(str(job.store), "tiny") == []
    run = open_tiny(job)
    update = run.require("it-0001/update")
    assert update.metrics["quarantined"] == 0 and update.metrics["steps"] == 2
    if any("kl" in key for key in keys):
        assert update.metrics["kl"] >= 0 and run.require("it-0002/update").metrics["kl"] > 0
