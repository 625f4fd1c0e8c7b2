"""Runs whose completions are pictures: all views of completions show them, each with its picture."""

import json
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rheostat.flows.cli.app import main
from rheostat.infra.store.runs import open_run
from rheostat.models.data.images import data_address, digest_of, thumbnail
from rheostat.models.records.media import Media
from rheostat.models.records.work import ExcerptWork, ScoredShard
from rheostat.models.rollouts.preview import PICTURED, read_excerpts
from rheostat.tasks.run.batch import picture_shards_of, rollouts_of
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.views.report.run import report_page
from tests.support.long_runs import write_long_run
from tests.support.pictures import picture

COLOURS = ("red", "green", "blue", "yellow")
PICTURES = tuple(picture(colour) for colour in COLOURS)
DIGESTS = {digest_of(each): each for each in PICTURES}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    place = tmp_path_factory.mktemp("store")
    write_long_run(place, name="painted", iterations=2, group=4, texts=("",), pictures=PICTURES)
    write_long_run(place, name="written", iterations=1, group=2)
    return str(place)


@pytest.fixture
def run_command(store, capsys):
    def give(*arguments):
        code = main([*arguments, "--store", store])
        return (code, *capsys.readouterr())

    return give


def test_the_shards_after_the_first_contain_pictures_unless_groups_are_carried_over(store):
    [made] = rollouts_of(open_run(store, "painted"), 1)
    assert picture_shards_of(made) == made.shards[1:] != ()
    assert picture_shards_of(made.model_copy(update={"detail": {"carried_rows": []}})) == ()
    [made] = rollouts_of(open_run(store, "written"), 1)
    assert picture_shards_of(made) == ()


def test_listed_rollouts_name_their_pictures_and_a_contact_sheet_sorts_pictures_by_reward(run_command, tmp_path):
    sheet = tmp_path / "sheet.png"
    told = ("rollouts", "painted", "--sort", "reward", "--limit", "256")
    code, out, err = run_command(*told, "--json", "--sheet", str(sheet))
    assert (code, err) == (0, "")
    samples = json.loads(out)
    assert all([image["digest"] in DIGESTS for image in sample["images"]] == [True] for sample in samples)
    prompts = list(dict.fromkeys(each["prompt_id"] for each in samples))
    rows = [[each for each in samples if each["prompt_id"] == prompt] for prompt in prompts]
    pixels = np.asarray(Image.open(BytesIO(sheet.read_bytes())))
    assert pixels.shape == (8 + 64 * (18 + 128 + 18 + 8), 8 + 4 * 136, 3)
    for number, row in enumerate(rows):
        for column, sample in enumerate(row):
            shown = Image.open(BytesIO(DIGESTS[sample["images"][0]["digest"]])).convert("RGB").getpixel((0, 0))
            middle = pixels[8 + number * 172 + 18 + 64, 8 + column * 136 + 64]
            assert tuple(middle) == shown
    assert {len(row) for row in rows} == {4} and rows[0][0]["reward"] == 1
    assert run_command("rollouts", "painted", "--limit", "1", "--sheet", str(tmp_path / "a.png"))[1].endswith(
        f"{tmp_path / 'a.png'}\n"
    )


@pytest.mark.parametrize(
    ("run", "name", "said"),
    [
        ("painted", "taken.png", "taken.png"),
        ("painted", "sheet.gif", ".png"),
        ("painted", "no/sheet.png", "No such file"),
        ("written", "sheet.png", "none of the 10"),
    ],
)
def test_an_invalid_contact_sheet_is_refused_in_one_line(run_command, tmp_path, run, name, said):
    (tmp_path / "taken.png").write_bytes(b"")
    code, out, err = run_command("rollouts", run, "--sheet", str(tmp_path / name))
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err
    assert (tmp_path / "taken.png").read_bytes() == b"" and len([*tmp_path.iterdir()]) == 1


def test_a_picture_is_found_by_the_beginning_of_its_digest_and_written_unchanged(run_command, tmp_path):
    digest, encoded = next(iter(DIGESTS.items()))
    assert run_command("media", "painted", digest[:12], "--to", str(tmp_path / "one.png"))[0] == 0
    assert (tmp_path / "one.png").read_bytes() == encoded
    assert "matches none of 4 images" in run_command("media", "painted", "zz", "--to", str(tmp_path / "two.png"))[2]


def test_the_page_of_rollouts_shows_the_pictures(run_command, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    code, out, _ = run_command("rollouts", "painted", "--limit", "8", "--open")
    found = re.findall(r'<img src="([^"]*)"', Path(out.strip()).read_text())
    assert code == 0 and len(found) == 8 and {*found} <= {*map(data_address, PICTURES)}


def test_excerpts_have_small_copies_of_their_pictures(store):
    run = open_run(store, "painted")
    [made] = rollouts_of(run, 1)
    scored = run.require(StageKey.parse(made.key).with_stage("scoring")).shards[0]
    work = ExcerptWork(
        iteration=1, shards=(ScoredShard(rollouts=made.shards[0], scores=scored),), prompts=6, characters=9,
        media=picture_shards_of(made),
    )  # fmt: skip
    found = read_excerpts(run.store, work)
    assert len(found.samples) == 6
    shown = [sample.images[0].digest for sample in found.samples[:PICTURED]]
    assert found.thumbnails == {digest: data_address(thumbnail(DIGESTS[digest])) for digest in shown}


def test_the_report_shows_one_picture_for_each_completion_and_none_for_the_prompt(store):
    html = report_page(store, "painted")
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    data = json.loads(text)
    assert data["images"] == {digest: data_address(thumbnail(each)) for digest, each in DIGESTS.items()}
    seen = []
    for group in data["groups"]:
        assert not group.get("images")
        assert [len(each["images"]) for each in group["completions"]] == [1] * 4
        seen += [(group["batch"], digest) for each in group["completions"] for digest in each["images"]]
    assert {batch for batch, _ in seen} == {"it-0001", "it-0002", "eval-0000", "eval-0001", "eval-0002"}
    run = open_run(store, "painted")
    [made] = rollouts_of(run, 1)
    assert {digest for batch, digest in seen if batch == "it-0001"} == {
        *Media(run.store, picture_shards_of(made)).digests
    }
