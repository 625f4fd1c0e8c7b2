"""A whole run whose prompts have images, and the commands that read or change the stored images."""

import json
import re
import stat
from io import BytesIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import pipeline

from rheostat.infra.store.shards import read_shard
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.data.images import digest_of
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.protocol import Request
from rheostat.models.records.media import InMemoryImages, Media
from rheostat.models.records.model_input import image_digests
from rheostat.models.records.versions import policy_of
from rheostat.models.text.tokenizer import load_tokenizer, tokenize_problems
from rheostat.models.vision.processor import load_processor
from rheostat.tasks.run.keys import PROMPTS, StageKey
from rheostat.tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.chat_server import chat_server, reply_with
from tests.support.demos import demo_module
from tests.support.jobs import files_of
from tests.support.stored_runs import open_tiny

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
FAMILY = "vision"

PICTURES = demo_module("vision", "pictures")
DATA = PICTURES.PicturesData(train_problems=12, heldout_problems=3)
RED = "rewards=[{kind='target', target='tests.support.rewards:share_of_red'}]"


def media_of(run):
    return Media(run.store, [shard for split in PROMPTS.values() for shard in run.require(split).shards[1:]])


def rollouts_in(run):
    made = [each for each in run.manifests() if "/rollout/" in each.key]
    return {each.key: read_shard(run.store, each.shards[0]) for each in made}


def test_every_rollout_names_the_image_of_its_prompt_and_the_store_has_it(whole):
    run = open_tiny(whole)
    media, found = media_of(run), rollouts_in(run)
    drawn = {split: PICTURES.picture_problems(DATA, split, 0) for split in ("train", "heldout")}
    assert {*media.digests} == {digest_of(problem.images[0]) for each in drawn.values() for problem in each}
    for key, table in found.items():
        problems = drawn["heldout" if key.startswith("eval") else "train"]
        for row, (digest,) in zip(table["prompt_row"].to_pylist(), image_digests(table), strict=True):
            assert media.encoded(digest) == problems[row].images[0]
    assert sum(table.num_rows for table in found.values()) == 2 * 4 * 4 + 2 * 2


def test_verify_accepts_the_run_and_finds_a_changed_pixel(whole, job):
    assert checker.problems_of(whole.run) == []
    assert verify_run(str(whole.store), "tiny") == []
    shard = open_tiny(job).require(PROMPTS["train"]).shards[1]
    path = job.run / shard.key
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 6] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    damaged = job.command("verify")
    assert damaged.code == 1 and shard.key.rpartition("/")[2][:16] in damaged.output


def test_rescore_passes_images_to_a_rule(job):
    assert job.command("rescore", "--rewards", RED, "--as", "red", "pools.cluster=threads").code == 0
    run = open_tiny(job)
    scored = [each for each in run.manifests("rescore/red/it-") if "/scoring/" in each.key]
    assert len(scored) == 4
    values = [v for each in scored for v in read_shard(run.store, each.shards[0])["reward"].to_pylist()]
    assert values == [0.0] * 32, "of each picture the upper left pixel is ground; without images it is -1"
    assert verify_run(str(job.store), "tiny") == []


def test_rescore_passes_images_to_a_judge(job):
    """Judge by the size of the received image in bytes: 1 if it is larger than the median."""
    run = open_tiny(job)
    sizes = sorted(media_of(run).shown(digest).bytes for digest in media_of(run).digests)
    median = sizes[len(sizes) // 2]

    def weighs(asked, before):
        [image] = asked.images
        return reply_with(f"{len(image)} bytes" if "colour" in asked.text else "yes" if len(image) > median else "no")

    with chat_server(weighs) as server:
        where = f"base_url='{server.url}', allowed_hosts=['127.0.0.1'], allow_private=true"
        model = f"{{kind='endpoint', model='j', {where}}}"
        judge = f"{{kind='judge', images='prompt', verdict={{kind='choice', constrained=false}}, model={model}}}"
        ended = job.command("rescore", "--rewards", f"rewards=[{judge}]", "--as", "judged", "pools.cluster=threads")
    assert ended.code == 0, ended.output
    media, rollouts = media_of(run), rollouts_in(run)
    for key, table in rollouts.items():
        if key.startswith("eval"):
            continue
        scores = read_shard(run.store, run.require(f"rescore/judged/{key.replace('rollout', 'scoring')}").shards[0])
        for text, (digest,), reward in zip(
            table["completion"].to_pylist(), image_digests(table), scores["reward"].to_pylist(), strict=True
        ):
            assert reward == float(bool(text.strip()) and len(media.encoded(digest)) > median)
    assert {len(each.images) for each in server.asked} == {1}
    assert verify_run(str(job.store), "tiny") == []


def test_forgetting_a_prompt_deletes_its_image(job, tmp_path):
    run = open_tiny(job)
    table = rollouts_in(run)["it-0001/rollout/0000"]
    prompt, (digest,) = table["prompt_id"][0].as_py(), image_digests(table)[0]
    picture = media_of(run).encoded(digest)
    assert any(picture in content for content in files_of(job.run).values())
    (tmp_path / "ids").write_text(f"{prompt}\n")
    assert job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete").code == 0
    assert not [name for name, content in files_of(job.run).items() if picture in content or digest.encode() in content]
    assert job.command("verify").code == 0
    assert job.command("rescore", "--rewards", RED, "--as", "later", "pools.cluster=threads").code == 0
    assert job.command("rollouts", "--iteration", "1").code == 0


# ---- seen


def test_exports_have_the_digests_of_the_images(job):
    assert job.command("export").code == 0
    run = open_tiny(job)
    known = {*media_of(run).digests}
    for number in (1, 2):
        table = pq.read_table(job.run / f"export/it-{number:04d}.parquet")
        assert [len(images) for images in table["images"].to_pylist()] == [1] * 16
        assert {images[0] for images in table["images"].to_pylist()} <= known


def test_rollouts_opens_a_page_with_images_in_the_browser(whole, tmp_path, monkeypatch):
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = whole.command("rollouts", "--open", "--limit", "3")
    assert ended.code == 0, ended.output
    page = Path(ended.output.strip())
    assert opened.read_text().strip() == page.as_uri()
    assert page.read_text().count('<img src="data:image/png;base64,') == 3
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_the_prefect_summary_shows_thumbnails_and_the_table_names_the_images(whole):
    found = json.loads((whole.home / "artifacts.json").read_text())
    known = media_of(open_tiny(whole)).digests
    shown = {digest[:16] for digest in known}
    pages = [each["data"] for each in found if each["key"] == "tiny-summary"]
    images = [re.findall(r"!\[image (\w{16})\]\(data:image/(?:png|jpeg);base64,([^)]*)\)", page) for page in pages]
    [named, *_] = [each for each in images if shown & {name for name, _ in each}]  # others are of other runs
    assert 1 <= len(named) <= 4 and {name for name, _ in named} <= shown
    assert all(len(encoded) <= 4096 * 4 // 3 + 4 for _, encoded in named)
    tables = [json.loads(each["data"]) for each in found if each["key"] == "tiny-rollouts"]
    assert any(row["images"] in shown for rows in tables for row in rows if "images" in row)


def test_an_exported_policy_generates_the_same_text_in_the_pipeline_of_transformers(whole, tmp_path):
    problems = PICTURES.picture_problems(PICTURES.PicturesData(train_problems=8, heldout_problems=1), "train", 7)
    target = tmp_path / "policy"
    exported = whole.command("export-policy", "--to", str(target))
    assert exported.code == 0, exported.output
    answering = pipeline("image-text-to-text", model=str(target))
    processor, tokenizer = load_processor(target), load_tokenizer(target)
    prompts = tokenize_problems(problems, tokenizer, processor)
    engine, policy = (
        HuggingFaceEngine(TransformersEngine()),
        open_tiny(whole).require("policy/initial"),
    )
    engine.load(target, policy_of(policy))
    engine.show(InMemoryImages({digest_of(problem.images[0]): problem.images[0] for problem in problems}))
    greedy = SamplingConfig(temperature=0, max_new_tokens=6)
    requests = [Request(row=row, inputs=(prompt.input,), seeds=(0,)) for row, prompt in enumerate(prompts)]
    wrote = [completion.text.strip() for [completion] in engine.generate(requests, greedy)]
    options = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": [*processor.banned]}
    for problem, prompt, expected in zip(problems, prompts, wrote, strict=True):
        shown, text = Image.open(BytesIO(problem.images[0])), f"{processor.shown}{prompt.text}"
        read = answering.processor(images=[shown], text=text)
        assert read["input_ids"][0] == prompt.input.tokens.tolist()
        [said] = answering(images=[shown], text=text, return_full_text=False, generate_kwargs=options)
        assert said["generated_text"].strip() == expected
    assert any(wrote)


# ---- judged


def test_a_vision_judge_is_trained_from_the_policy_and_scores_every_completion(undisturbed):
    job = undisturbed("vision judge")
    run = open_tiny(job)
    made, trained = (run.require(StageKey.reward_model("judge", is_base=each)) for each in (True, False))
    assert made.bundles == run.require(StageKey.policy(0)).bundles != trained.bundles
    judged = [each for each in run.manifests("it-") if "/judge-judge/" in each.key]
    values = [v for each in judged for v in read_shard(run.store, each.shards[0])["value"].to_pylist()]
    assert len(values) == 32 and len(set(values)) > 4
    assert verify_run(str(job.store), "tiny") == []
    assert checker.problems_of(job.run) == []
