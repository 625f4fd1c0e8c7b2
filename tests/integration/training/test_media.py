"""Preparation of prompts with images: expanded tokens, media shards, and the result of forgetting a prompt."""

import json
from types import SimpleNamespace

import pytest

from rheostat.flows.cli.app import main
from rheostat.flows.cli.output import rollout_text
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.runs import create_run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.data import FileData
from rheostat.models.config.images import PixelLimits
from rheostat.models.data import images
from rheostat.models.data.images import digest_of, media_tables
from rheostat.models.records.media import Media
from rheostat.models.records.model_input import prompt_inputs
from rheostat.models.records.schemas import MEDIA_SCHEMA, PROMPT_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import PromptWork
from rheostat.models.rollouts.forgotten import erase_prompts, find_prompts
from rheostat.models.rollouts.preview import read_samples
from rheostat.models.vision.families import ImageSize
from rheostat.models.vision.pixels import limit_pixels, load_limited_processor
from rheostat.models.vision.processor import load_processor
from rheostat.models.workers.preparation import PreparationWorker
from rheostat.tasks.views.runs import write_image
from tests.support.pictures import picture
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.vision import write_seeing

RED, BLUE, GREEN = (picture(colour) for colour in ("red", "blue", "green"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_seeing(tmp_path_factory.mktemp("idefics3"), "idefics3")


@pytest.fixture
def prepared(tmp_path, policy):
    """Prepare rows of a question and its pictures for a vision-language policy. Return the outcome and the store."""
    store = open_store(f"{tmp_path}/run")
    version = ModelVersion(version=0, weights=publish_bundle(store, policy, prefix="policies"))

    def prepare(*rows, max_new_tokens=8):
        for name, encoded in {"red.png": RED, "blue.png": BLUE, "green.png": GREEN}.items():
            (tmp_path / name).write_bytes(encoded)
        lines = [{"prompt": "How many red?", "answer": str(n), "images": shown} for n, shown in enumerate(rows)]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
        data = FileData(path=tmp_path / "a.jsonl", heldout_path=tmp_path / "a.jsonl", images_column="images")
        work = PromptWork(data=data, split="train", policy=version, seed=0, max_new_tokens=max_new_tokens)
        return PreparationWorker(str(tmp_path), "run", threads=1).make_prompts(work)

    return prepare, store


def test_prompts_name_their_images_and_media_shards_contain_each_image_once(prepared):
    prepare, store = prepared
    outcome = prepare(["red.png"], ["blue.png", "red.png"], [], ["blue.png"])
    prompts, media = (read_shard(store, shard) for shard in outcome.shards)
    assert prompts.schema.remove_metadata() == PROMPT_SCHEMA
    assert media.schema.remove_metadata() == MEDIA_SCHEMA
    assert media.schema.metadata[b"rheostat.kind"] == b"media"
    red, blue = digest_of(RED), digest_of(BLUE)
    assert prompts["images"].to_pylist() == [[red], [blue, red], [], [blue]]
    assert media.drop_columns("bytes").to_pylist() == [
        {"digest": digest, "format": "PNG", "width": 24, "height": 24} for digest in (red, blue)
    ]
    shown = Media(store, outcome.shards[1:])
    assert [shown.encoded(digest) for digest in (blue, red)] == [BLUE, RED]
    assert outcome.metrics["images"] == 2


def test_prompts_have_the_image_tokens_of_the_policys_processor(prepared, policy):
    prepare, store = prepared
    outcome = prepare(["red.png"], [], ["blue.png", "red.png"])
    processor = load_processor(policy)
    found = [
        each.tokens.tolist().count(processor.image_id) for each in prompt_inputs(read_shard(store, outcome.shards[0]))
    ]
    assert found == [9, 0, 18]


def test_rows_with_the_same_text_and_different_images_are_different_prompts(prepared):
    prepare, store = prepared
    ids = read_shard(store, prepare(["red.png"], ["blue.png"], ["red.png"]).shards[0])["prompt_id"].to_pylist()
    assert ids[0] == ids[2] != ids[1]


def test_the_same_problems_give_the_same_shards(prepared):
    prepare, _ = prepared
    assert prepare(["red.png"], ["blue.png"]).shards == prepare(["red.png"], ["blue.png"]).shards


def test_the_message_about_a_prompt_that_is_too_long_has_the_tokens_of_each_image(prepared, policy):
    prepare, _ = prepared
    context = json.loads((policy / "config.json").read_text())["text_config"]["max_position_embeddings"]
    with pytest.raises(
        BadInput, match=r"a.jsonl:1: the prompt has \d+ tokens \(9 for image 1, 9 for image 2\), but it must have 1"
    ):
        prepare(["red.png", "blue.png"], max_new_tokens=context - 18)


def test_media_shards_are_split_before_they_become_too_large(monkeypatch):
    monkeypatch.setattr(images, "SHARD_BYTES", len(RED) + len(BLUE))
    tables = list(media_tables([RED, BLUE, RED, GREEN, BLUE]))
    assert [table["bytes"].to_pylist() for table in tables] == [[RED, BLUE], [GREEN]]


# ---- forgotten


def test_forgetting_a_prompt_deletes_the_images_that_no_other_prompt_has(prepared):
    prepare, store = prepared
    outcome = prepare(["red.png", "blue.png"], ["blue.png"], ["green.png"])
    prompts, media = (read_shard(store, shard) for shard in outcome.shards)
    gone = find_prompts(prompts, prompts["prompt_id"].to_pylist()[:1])
    after, rows = erase_prompts(prompts, gone)
    assert (after["images"].to_pylist(), rows) == ([[], [digest_of(BLUE)], [digest_of(GREEN)]], 1)
    kept, lost = erase_prompts(media, gone)
    assert (kept["bytes"].to_pylist(), lost) == ([BLUE, GREEN], 1)
    again = find_prompts(after, gone.ids)  # as where it was cut short between the two
    assert erase_prompts(media, again)[0].equals(kept)


# ---- how large images are


def test_pixel_limits_are_written_to_the_policys_directory(tmp_path):
    directory = write_seeing(tmp_path / "qwen", "qwen2_5_vl")
    before, size = load_processor(directory), ImageSize(64, 64)
    within = load_limited_processor(directory, PixelLimits(max_pixels=256))
    assert (before.count_tokens(size), within.count_tokens(size)) == (16, 4)
    assert load_processor(directory).count_tokens(size) == 16  # nothing was written there
    limit_pixels(directory, PixelLimits(max_pixels=256))
    assert load_processor(directory).count_tokens(size) == 4
    assert load_processor(directory).count_tokens(ImageSize(8, 8)) == before.count_tokens(ImageSize(8, 8))


def test_pixel_limits_are_refused_for_a_policy_that_does_not_support_them(policy):
    with pytest.raises(BadInput, match=r"min_pixels .*qwen2_vl, .*idefics3"):
        load_limited_processor(policy, PixelLimits(min_pixels=64))


# ---- seen


def test_an_image_of_a_run_is_described_and_written_unchanged(prepared, tmp_path, capsys):
    prepare, store = prepared
    run = create_run(str(tmp_path / "store"), "job", {})
    shards = prepare(["red.png"], ["blue.png"]).shards
    media = Media(store, shards[1:])
    assert media.shown(digest_of(RED)).model_dump() == {
        "digest": digest_of(RED), "format": "PNG", "width": 24, "height": 24, "bytes": len(RED)
    }  # fmt: skip
    with pytest.raises(BadInput, match=r"'ab' must be the beginning of .* of run 'job', but it matches none of 0"):
        write_image(run, "ab", tmp_path / "new.png")
    assert main(["media", "job", "ab", "--to", str(tmp_path / "new.png"), "--store", str(tmp_path / "store")]) == 2
    assert "'ab' must be the beginning of the digest of exactly one image of run 'job'" in capsys.readouterr().err
    prompts = {"prompts/train": SimpleNamespace(shards=shards)}
    having = SimpleNamespace(store=store, name="job", find=lambda key: prompts.get(str(key)))
    assert write_image(having, digest_of(BLUE)[:6], tmp_path / "new.png").digest == digest_of(BLUE)
    assert (tmp_path / "new.png").read_bytes() == BLUE
    with pytest.raises(BadInput, match=r"already exists"):
        write_image(having, digest_of(BLUE), tmp_path / "new.png")
    rollouts = write_rollouts(store, rollout(1, 0, "x", images=[digest_of(RED)]), rollout(2, 0, "y"))
    samples = read_samples(store, rollouts, None, iteration=1, media=media)
    assert [[image.digest for image in sample.images] for sample in samples] == [[digest_of(RED)], []]
    assert f"image {digest_of(RED)[:16]}, PNG 24 x 24, {len(RED)} bytes\nprompt 1" in rollout_text(samples[0])
