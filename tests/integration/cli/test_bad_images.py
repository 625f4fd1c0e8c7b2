"""What can be wrong with images is said in one line before a run begins, with its place; and what is right is taken."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config import PoolsConfig
from infra.errors import BadInput
from models.commands.preflight import Inputs, check
from models.config.algorithms import Grpo
from models.config.data import FileData
from models.config.engines import SamplingConfig
from models.config.judges import ChoiceVerdict, EndpointJudge, JudgeReward
from models.config.objectives import UpdateConfig
from models.config.policy import DirectoryPolicy, PolicyConfig, ScratchPolicy
from models.config.reward_terms import RegexReward, TargetReward
from models.config.rewards import RewardConfig, ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.training import EvaluationConfig
from tests.support.chat_server import chat_server
from tests.support.judged import ignores, looks
from tests.support.pictures import animation, picture
from tests.support.vision import write_seeing

RED, BLUE = picture("red"), picture("blue")
RULE = RegexReward(pattern="4")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing"), "idefics3")


@pytest.fixture
def home(tmp_path) -> Path:
    for name, encoded in {"red.png": RED, "blue.png": BLUE}.items():
        (tmp_path / name).write_bytes(encoded)
    return tmp_path


def rows(path: Path, *each: dict[str, object]) -> Path:
    known = {"prompt": "How many?", "answer": "4"}
    path.write_text("\n".join(json.dumps(known | row) for row in each))
    return path


def inputs(home: Path, policy: Path | PolicyConfig, *train: dict[str, object], reward: RewardConfig = RULE) -> Inputs:
    """Ask about these rows to learn from, with a blue picture held out."""
    if not (home / "heldout.jsonl").exists():
        rows(home / "heldout.jsonl", {"images": "blue.png"})
    data = FileData(
        path=rows(home / "train.jsonl", *(train or ({"images": "red.png"},))),
        heldout_path=home / "heldout.jsonl",
        images_column="images",
    )
    return Inputs(
        seed=0,
        data=data,
        policy=DirectoryPolicy(path=policy) if isinstance(policy, Path) else policy,
        warmup=None,
        preferences=None,
        dpo=None,
        rollout=RolloutConfig(prompts=1, sampling=SamplingConfig(max_new_tokens=8)),
        scoring=ScoringConfig(rewards=(reward,)),
        algorithm=Grpo(),
        update=UpdateConfig(),
        pools=PoolsConfig(),
        evaluation=EvaluationConfig(problems=1),
    )


def refusal(asked: Inputs) -> str:
    with pytest.raises(BadInput) as raised:
        check(asked)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_images_that_a_policy_sees_are_taken(home, policy):
    assert check(inputs(home, policy))["train_problems"] == 1


def written(encoded: bytes) -> Callable[[Path], dict[str, object]]:
    def write(home: Path) -> dict[str, object]:
        (home / "odd.png").write_bytes(encoded)
        return {"images": "odd.png"}

    return write


PLACES = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Hm?"}]}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (lambda home: {"images": "gone.png"}, "gone.png cannot be read: No such file"),
        (lambda home: {"images": "../red.png"}, "'../red.png' outside it"),
        (lambda home: {"images": "https://a.b/red.png"}, "found the address 'https://a.b/red.png'"),
        (written(b"no image"), "not decodable: expected an image"),
        (written(picture(size=(300, 300), kind="JPEG")[:-400]), "not decodable: image file is truncated"),
        (written(animation()), "found an animation or several pages"),
        (written(picture(size=(201, 1))), "expected sides of 1 to 200 at most, found 201 x 1"),
        (lambda home: {"images": "red.png", "prompt": PLACES}, "the messages have places for 2 images, found 1"),
        (lambda home: {"images": "red.png", "prompt": "<image>?"}, "expected as many images as places"),
        (lambda home: {"images": ["red.png"] * 30}, r"(9 for image 1, 9 for image 2"),
    ],
    ids=["missing", "outside", "address", "no image", "torn", "animated", "long", "places", "spelt", "tokens"],
)
def test_a_row_whose_images_cannot_be_seen_is_named(home, policy, row, said):
    message = refusal(inputs(home, policy, row(home)))
    assert f"{home / 'train.jsonl'}:1" in message
    assert said in message


def test_a_held_out_file_without_the_column_is_bad_input(home, policy):
    rows(home / "heldout.jsonl", {"image": "blue.png"})
    assert "heldout.jsonl:1: no column 'images', did you mean 'image'?" in refusal(inputs(home, policy))


def test_a_policy_that_does_not_see_or_says_not_how_is_bad_input(home, policy, tmp_path_factory):
    said = refusal(inputs(home, ScratchPolicy()))
    assert "train.jsonl:1: expected a prompt without images, found 1: the policy reads text alone" in said
    bare = write_seeing(tmp_path_factory.mktemp("bare"), "idefics3")
    (bare / "preprocessor_config.json").unlink()
    said = refusal(inputs(home, bare))
    assert (
        "expected preprocessor_config.json or processor_config.json beside a idefics3, which sees; found none" in said
    )


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm", "llava"])
def test_an_image_that_the_model_would_take_for_padding_is_found_before_the_run(home, kind, tmp_path_factory):
    directory = write_seeing(tmp_path_factory.mktemp(kind), kind)
    (home / "black.png").write_bytes(picture("black"))
    asked = inputs(home, directory, {"images": "red.png"}, {"images": "black.png"})
    check(asked)  # black is -1 after normalisation
    settings = directory / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_normalize": False}))
    if kind == "llava":
        check(asked)  # it pads nothing
    else:
        assert "train.jsonl:2: image 1: every pixel is 0 after normalisation: the model would take" in refusal(asked)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("needs_rgba", "reward target: ValueError: expected RGBA, found RGB; it was called with the images of "),
        ("says_nothing", "reward target: expected a float, found NoneType"),
    ],
)
def test_a_reward_that_cannot_read_images_is_refused_before_the_run(home, policy, function, said):
    reward = TargetReward(target=f"tests.support.rewards:{function}")
    message = refusal(inputs(home, policy, reward=reward))
    assert said in message
    assert "train.jsonl:1 and the right answer" in message


@pytest.mark.parametrize("target", ["share_of_red", "even"])
def test_a_reward_that_reads_images_or_takes_none_is_taken(home, policy, target):
    check(inputs(home, policy, reward=TargetReward(target=f"tests.support.rewards:{target}")))


@pytest.mark.system
def test_a_command_whose_judge_does_not_see_ends_with_2_and_one_line_though_all_else_was_found_before(home, policy):
    with chat_server(looks) as server:
        model = EndpointJudge(base_url=server.url, allowed_hosts=("127.0.0.1",), allow_private=True, model="j")
        reward = JudgeReward(name="eyes", model=model, images="prompt", verdict=ChoiceVerdict(constrained=False))
        asked, codes = inputs(home, policy, reward=reward), []
        for server.reply in (looks, ignores):
            done = subprocess.run(
                [sys.executable, "-m", "models.commands.preflight", "run"],
                input=asked.model_dump_json(),
                capture_output=True,
                text=True,
                env={"XDG_CACHE_HOME": str(home / "cache"), "PATH": "/usr/bin:/bin"},
            )
            codes.append(done.returncode)
    assert codes == [0, 2], done.stderr
    assert [*(home / "cache/rheostat/checks").iterdir()] != []
    verdict = json.loads(done.stdout)
    assert verdict["error"].startswith("reward eyes: its judge at ") and not verdict["is_down"]
    assert "does not see" in verdict["error"]
