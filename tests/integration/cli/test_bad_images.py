"""Images that are checked before a run begins; the refusals of data are in tests/unit/refusals/models.toml."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from tests.support.chat_server import chat_server
from tests.support.jobs import SEARCH_PATH
from tests.support.judged import answer_from_image, answer_without_image
from tests.support.pictures import picture
from tests.support.preflight import check_job, read_inputs
from tests.support.vision import write_seeing


@pytest.fixture
def place(make_job) -> Path:
    return make_job("images")


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "reward",
    [
        "{kind='regex',pattern='4'}",
        "{kind='target',target='tests.support.rewards:share_of_red'}",
        "{kind='target',target='tests.support.rewards:even'}",
    ],
    ids=["rule", "target with images", "target without images"],
)
def test_a_policy_and_rewards_that_read_the_images_are_accepted(place, reward):
    assert check_job(f"scoring.rewards=[{reward}]")["train_problems"] == 1


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", ["idefics3", "smolvlm", "llava"])
def test_an_image_that_the_model_treats_as_padding_is_refused_before_the_run(place, kind):
    write_seeing(place / kind, kind)
    (place / "black.png").write_bytes(picture("black"))
    (place / "train.jsonl").write_text('{"prompt": "How many?", "answer": "4", "images": "black.png"}')
    check_job(f"policy.path={kind}")  # black is -1 after normalization
    settings = place / kind / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_normalize": False}))
    if kind == "llava":
        check_job(f"policy.path={kind}")  # LLaVA pads nothing
        return
    with pytest.raises(BadInput, match=r"/train.jsonl:1: images: image 1: every pixel .*is 0 after normalization"):
        check_job(f"policy.path={kind}")


@pytest.mark.system
def test_a_judge_that_ignores_images_is_refused_even_if_all_other_checks_are_cached(place):
    with chat_server(answer_from_image) as server:
        reward = (
            "scoring.rewards=[{kind='judge',name='eyes',images='prompt',verdict={kind='choice',constrained=false},"
            f"model={{kind='endpoint',base_url='{server.url}',allowed_hosts=['127.0.0.1'],allow_private=true,model='j'}}}}]"
        )
        question, codes = read_inputs(reward).model_dump_json(), []
        for server.reply in (answer_from_image, answer_without_image):
            done = subprocess.run(
                [sys.executable, "-m", "rheostat.models.commands.preflight", "run"],
                input=question,
                capture_output=True,
                text=True,
                env={"XDG_CACHE_HOME": str(place / "cache"), "PATH": "/usr/bin:/bin", "PYTHONPATH": SEARCH_PATH},
            )
            codes.append(done.returncode)
    assert codes == [0, 2], done.stderr
    assert [*(place / "cache/rheostat/checks").iterdir()] != []
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["error"].startswith("reward eyes: the judge at ") and not verdict["is_down"]
    assert "seems to ignore images" in verdict["error"]
