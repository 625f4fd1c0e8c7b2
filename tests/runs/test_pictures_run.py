"""A whole run whose prompts show pictures: killed anywhere it ends the same, and all that reads it finds its images."""

import json
import re
import shutil
import stat
from io import BytesIO
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import pipeline

from infra.store.runs import open_run
from infra.store.shards import read_shard
from models.config.data import PicturesData
from models.config.engines import SamplingConfig, TransformersEngine
from models.data.images import digest_of
from models.data.pictures import picture_problems
from models.engines.local.engine import HuggingFaceEngine
from models.engines.protocol import Request
from models.records.media import HeldImages, Media
from models.records.model_input import image_digests
from models.records.versions import policy_of
from models.text.tokenizer import load_tokenizer, tokenize_problems
from models.vision.processor import load_processor
from tasks.run.keys import PROMPTS, StageKey
from tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.chaos import Strike, problems_after, run_once
from tests.support.chat_server import chat_server, says
from tests.support.in_process import InProcessJob
from tests.support.jobs import PASSWORD, files_of, manifests_of, shards_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

DATA = PicturesData(train_problems=12, heldout_problems=3)
SEEING = (
    "data.kind=pictures",
    "data.train_problems=12",
    "data.heldout_problems=3",
    "policy.kind=seeing_scratch",
    *("policy.heads=", "policy.kv_heads=", "policy.layers="),
    "policy.decoder={initial_std=0.02}",  # a policy of few steps then says more than nothing
    "iterations=2",
    "warmup.steps=2",
    "rollout.prompts=4",
    "rollout.shard_prompts=2",
    "rollout.sampling.max_new_tokens=6",
    "evaluation.problems=2",
    "controllers.count=1",
)
RED = "rewards=[{kind='target', target='tests.support.rewards:share_of_red'}]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api):
    """The run, never disturbed."""
    job = InProcessJob(tmp_path_factory.mktemp("pictured"), prefect_api)
    job.train(*SEEING)
    asked = {"artifacts": {"key": {"any_": ["tiny-summary", "tiny-rollouts"]}}}
    shown = httpx.post(f"{prefect_api}/artifacts/filter", json=asked, auth=PASSWORD)  # some test forgets a run soon
    (job.home / "artifacts.json").write_text(shown.raise_for_status().text)
    return job


@pytest.fixture
def job(whole, tmp_path):
    """A copy of it."""
    copy = InProcessJob(tmp_path, whole.api)
    shutil.copytree(whole.run, copy.run)
    return copy


def media_of(run):
    return Media(run.store, [shard for split in PROMPTS.values() for shard in run.require(split).shards[1:]])


def rollouts_in(run):
    made = [each for each in run.manifests() if "/rollout/" in each.key]
    return {each.key: read_shard(run.store, each.shards[0]) for each in made}


def test_every_rollout_names_the_picture_of_its_prompt_and_the_run_has_it(whole):
    run = open_run(str(whole.store), "tiny")
    media, found = media_of(run), rollouts_in(run)
    drawn = {split: picture_problems(DATA, split, 0) for split in ("train", "heldout")}
    assert {*media.digests} == {digest_of(problem.images[0]) for each in drawn.values() for problem in each}
    for key, table in found.items():
        problems = drawn["heldout" if key.startswith("eval") else "train"]
        for row, (digest,) in zip(table["prompt_row"].to_pylist(), image_digests(table), strict=True):
            assert media.encoded(digest) == problems[row].images[0]
    assert sum(table.num_rows for table in found.values()) == 2 * 4 * 4 + 2 * 2


def test_the_run_keeps_every_promise_and_a_pixel_that_was_changed_is_found(whole, job):
    assert checker.problems_of(whole.run) == []
    assert verify_run(str(whole.store), "tiny") == []
    shard = open_run(str(job.store), "tiny").require(PROMPTS["train"]).shards[1]
    path = job.run / shard.key
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 6] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    damaged = job.command("verify")
    assert damaged.code == 1 and shard.key.rpartition("/")[2][:16] in damaged.output


def test_stored_rollouts_are_scored_again_by_a_rule_that_sees(job):
    assert job.command("rescore", "--rewards", RED, "--as", "red", "pools.cluster=threads").code == 0
    run = open_run(str(job.store), "tiny")
    scored = [each for each in run.manifests("rescore/red/it-") if "/scoring/" in each.key]
    assert len(scored) == 4
    values = [v for each in scored for v in read_shard(run.store, each.shards[0])["reward"].to_pylist()]
    assert values == [0.0] * 32, "of each picture the upper left pixel is ground; without images it is -1"
    assert verify_run(str(job.store), "tiny") == []


def test_stored_rollouts_are_judged_again_by_a_judge_that_looks(job):
    """It answers with how large the image is that it got, in bytes: 1 for more than the median."""
    run = open_run(str(job.store), "tiny")
    sizes = sorted(media_of(run).shown(digest).bytes for digest in media_of(run).digests)
    median = sizes[len(sizes) // 2]

    def weighs(asked, before):
        [image] = asked.images
        return says(f"{len(image)} bytes" if "colour" in asked.text else "yes" if len(image) > median else "no")

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


def test_a_prompt_that_is_forgotten_takes_its_picture_with_it(job, tmp_path):
    run = open_run(str(job.store), "tiny")
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


def test_exported_rollouts_have_the_digests_of_their_images(job):
    assert job.command("export").code == 0
    run = open_run(str(job.store), "tiny")
    known = {*media_of(run).digests}
    for number in (1, 2):
        table = pq.read_table(job.run / f"export/it-{number:04d}.parquet")
        assert [len(images) for images in table["images"].to_pylist()] == [1] * 16
        assert {images[0] for images in table["images"].to_pylist()} <= known


def test_the_page_of_rollouts_opens_in_the_browser_with_their_pictures(whole, tmp_path, monkeypatch):
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


def test_prefects_summary_shows_small_pictures_of_the_last_rollouts_and_the_table_names_them(whole):
    found = json.loads((whole.home / "artifacts.json").read_text())
    known = media_of(open_run(str(whole.store), "tiny")).digests
    pages = [each["data"] for each in found if each["key"] == "tiny-summary" and "![image" in each["data"]]
    [page] = pages[:1]
    named = re.findall(r"!\[image (\w{16})\]\(data:image/(?:png|jpeg);base64,([^)]*)\)", page)
    assert 1 <= len(named) <= 4
    assert {name for name, _ in named} <= {digest[:16] for digest in known}
    assert all(len(encoded) <= 4096 * 4 // 3 + 4 for _, encoded in named)
    tables = [json.loads(each["data"]) for each in found if each["key"] == "tiny-rollouts"]
    assert any(row["images"] in {digest[:16] for digest in known} for rows in tables for row in rows if "images" in row)


def test_an_exported_policy_says_in_transformers_pipeline_what_the_engine_says(whole, tmp_path):
    problems = picture_problems(PicturesData(train_problems=8, heldout_problems=1), "train", 7)
    target = tmp_path / "policy"
    exported = whole.command("export-policy", "--to", str(target))
    assert exported.code == 0, exported.output
    answering = pipeline("image-text-to-text", model=str(target))
    processor, tokenizer = load_processor(target), load_tokenizer(target)
    prompts = tokenize_problems(problems, tokenizer, processor)
    engine, policy = (
        HuggingFaceEngine(TransformersEngine()),
        open_run(str(whole.store), "tiny").require("policy/initial"),
    )
    engine.load(target, policy_of(policy))
    engine.show(HeldImages({digest_of(problem.images[0]): problem.images[0] for problem in problems}))
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


# ---- killed


def test_a_run_with_pictures_that_was_killed_again_and_again_ends_with_the_same_bits(whole, tmp_path, prefect_api):
    run = open_run(str(whole.store), "tiny")
    strikes = [
        Strike(run.require(PROMPTS["train"]).shards[1].key, "during"),
        Strike("manifests/prompts/train.json", "before"),
        Strike("manifests/it-0001/rollout/0001.json", "before"),
        Strike("manifests/it-0001/update.json", "after"),
        Strike("manifests/it-0002/credit.json", "before"),
    ]
    assert problems_after(strikes, tmp_path / "killed", prefect_api, whole.run, SEEING, start=run_once) == []


def test_a_run_goes_on_from_its_first_iteration_to_the_same_bits(whole, tmp_path):
    job = InProcessJob(tmp_path, whole.api, counts_works=True)
    shutil.copytree(whole.run, job.run)
    for pattern in ("it-0001/[cusr]*", "it-0002/**/*", "it-0002", "eval-0002/**/*", "eval-0002"):
        for path in sorted(job.run.glob(f"manifests/{pattern}"), reverse=True):
            path.unlink() if path.is_file() else shutil.rmtree(path)
    for path in (job.run / "chain").glob("*.json"):
        if int(path.name.partition("-")[0]) >= 1:
            path.unlink()
    job.train(*SEEING)
    assert manifests_of(job.run) == manifests_of(whole.run)
    assert shards_of(job.run) == shards_of(whole.run)


# ---- judged


def test_a_run_makes_a_judge_that_sees_of_its_policy_and_learns_from_what_it_says_the_same_twice(tmp_path, prefect_api):
    decoder = "policy.decoder={initial_std=0.02, context=160}"
    model = "{kind='trained', warmup={steps=2, batch_size=4}, shape={kind='policy'}}"
    rewards = f"scoring.rewards=[{{kind='judge', images='prompt', verdict={{kind='logprob'}}, model={model}}}]"
    jobs = [InProcessJob(tmp_path / name, prefect_api) for name in ("one", "two")]
    for each in jobs:
        each.train(*(key for key in SEEING if "decoder" not in key), decoder, rewards)
    first, second = jobs
    assert manifests_of(first.run) == manifests_of(second.run)
    run = open_run(str(first.store), "tiny")
    made, trained = (run.require(StageKey.reward_model("judge", made=each)) for each in (True, False))
    assert made.bundles == run.require(StageKey.policy(0)).bundles != trained.bundles
    judged = [each for each in run.manifests("it-") if "/judge-judge/" in each.key]
    values = [v for each in judged for v in read_shard(run.store, each.shards[0])["value"].to_pylist()]
    assert len(values) == 32 and len(set(values)) > 4
    assert verify_run(str(first.store), "tiny") == []
    assert checker.problems_of(first.run) == []
