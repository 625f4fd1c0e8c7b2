"""Judges that get the images of prompts: by HTTP, in the worker, and trained by the run."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rheostat.infra.errors import BadInput, Damaged, EndpointDown
from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.data import FileData
from rheostat.models.config.judges import Canaries, DirectoryJudge, EndpointJudge, JudgeReward, TrainedJudge
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, StepsVerdict
from rheostat.models.data.images import digest_of, media_tables
from rheostat.models.data.problems import load_problems
from rheostat.models.inspection.images import check_judge_images
from rheostat.models.inspection.other_models import check_served_model
from rheostat.models.judges.prompts import build_question_text, question_about
from rheostat.models.judges.votes import Ballot, JudgedCompletion
from rheostat.models.modeling import initial
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.media import MEDIA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import JudgeWarmupWork, JudgeWork, RewardModelPreparation
from rheostat.models.text.tokenizer import load_tokenizer, problem_texts, tokenize_problems
from rheostat.models.vision.families import ImageSize
from rheostat.models.vision.parts import part_of
from rheostat.models.vision.processor import load_processor
from rheostat.models.workers.judge import JudgeWorker
from rheostat.models.workers.preparation import PreparationWorker
from rheostat.models.workers.update import UpdateWorker
from tests.support.chat_server import ChatRequest, Reply, chat_server, reply_with
from tests.support.demos import demo_part
from tests.support.judged import answer_from_image, answer_without_image, read_colour
from tests.support.pictures import picture
from tests.support.policies import write_policy
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.seeing import logits_of
from tests.support.update_workers import join_alone
from tests.support.vision import picture as noise
from tests.support.vision import write_seeing

RED, BLUE = picture("red"), picture("blue")
IMITATION = "It is red & <image> so."
"""Completion that would add a placeholder for an image if it were not escaped."""


def rows_with(*each: tuple[str, tuple[bytes, ...]]) -> list[dict[str, object]]:
    """Return a rollout row for each completion, whose prompt shows the images."""
    return [
        rollout(row, 0, text, images=[digest_of(image) for image in images], prompt="What colour?<image>")
        for row, (text, images) in enumerate(each)
    ]


def endpoint_reward(url: str, **changes: object) -> JudgeReward:
    model = EndpointJudge(
        base_url=url, allowed_hosts=("127.0.0.1",), allow_private=True, model="j", backoff_seconds=0.02, retries=1
    )
    settings = {"model": model, "images": "prompt", "verdict": ChoiceVerdict(constrained=False), **changes}
    return JudgeReward.model_validate(settings)


def judge(
    home: Path, reward: JudgeReward, rows: list[dict[str, object]], model: ModelVersion | None = None, *images: bytes
) -> Outcome:
    store = open_store(f"{home}/run")
    [table] = media_tables(images or (RED, BLUE))
    media = write_shard(store, table, kind=MEDIA, metadata={})
    work = JudgeWork(iteration=3, rollouts=write_rollouts(store, *rows), model=model, seed=5, media=(media,))
    return JudgeWorker(str(home), "run", "seeing", reward, 1).judge(work)


def values(home: Path, outcome: Outcome) -> list[float]:
    return read_shard(open_store(f"{home}/run"), outcome.shards[0])["value"].to_pylist()


# ---- behind an endpoint


def test_a_judge_behind_an_endpoint_gets_the_images_of_the_prompt_before_its_question(tmp_path):
    rows = rows_with(("red", (RED,)), ("red", (BLUE,)), ("blue", (BLUE, RED)), ("blue", ()))
    with chat_server(answer_from_image) as server:
        outcome = judge(tmp_path, endpoint_reward(server.url), rows)
    assert values(tmp_path, outcome) == [1, 0, 1, 0]
    asked = {tuple(each.images): each.body["messages"][0]["content"] for each in server.asked}
    assert set(asked) == {(RED,), (BLUE,), (BLUE, RED), ()}
    assert [part["type"] for part in asked[BLUE, RED]] == ["image_url", "image_url", "text"]
    assert isinstance(asked[()], str), "the question about a prompt without images is plain text"


def test_quoted_text_stays_escaped_next_to_images(tmp_path):
    with chat_server(answer_from_image) as server:
        judge(tmp_path, endpoint_reward(server.url), rows_with((IMITATION, (RED,))))
    [asked] = server.asked
    assert "It is red &amp; &lt;image&gt; so." in asked.text
    assert "What colour?&lt;image&gt;" in asked.text
    assert "<image>" not in asked.text


def test_a_judge_without_images_in_its_settings_gets_text_only(tmp_path):
    with chat_server(lambda asked, before: reply_with("yes")) as server:
        judge(tmp_path, endpoint_reward(server.url, images="none"), rows_with(("red", (RED,))))
    assert isinstance(server.asked[0].body["messages"][0]["content"], str)


def test_canaries_are_judged_with_the_image_of_their_prompt(tmp_path):
    canaries = Canaries(answers=("I do not know.", "It is blue."), per_shard=3)
    with chat_server(answer_from_image) as server:
        outcome = judge(
            tmp_path, endpoint_reward(server.url, canaries=canaries), rows_with(("red", (RED,)), ("red", (BLUE,)))
        )
    assert values(tmp_path, outcome) == [0, 1, 0, 1, 0]  # the second, of the blue prompt, names its colour
    assert outcome.metrics["canaries_passed"] == 1
    assert sum(each.images == [RED] for each in server.asked) == 3


def test_steps_are_judged_with_the_image(tmp_path):
    def wrong_unless_red(asked, before):
        wrong = "" if asked.images == [RED] else "0"
        return reply_with(f"Verdict: correct\n<incorrect_steps>{wrong}</incorrect_steps>")

    with chat_server(wrong_unless_red) as server:
        reward = endpoint_reward(server.url, verdict=StepsVerdict(), votes=2)
        outcome = judge(tmp_path, reward, rows_with(("It is.\n\nSo red.", (RED,)), ("It is.\n\nSo red.", (BLUE,))))
    assert values(tmp_path, outcome) == [0, 0, -0.5, -0.5]


def test_an_image_that_the_work_does_not_name_is_damage_and_its_completion_is_not_judged(tmp_path):
    with chat_server(answer_from_image) as server, pytest.raises(Damaged, match="missing from the media shards"):
        judge(tmp_path, endpoint_reward(server.url), rows_with(("red", (RED,))), None, BLUE)
    assert server.asked == []


# ---- before the run: whether the judge uses images


def check_sight(reward: JudgeReward) -> None:
    check_judge_images(ScoringConfig(rewards=(reward.model_copy(update={"name": "eyes"}),)))


def answer_yes_or_no(asked: ChatRequest, before: int) -> Reply:
    """Answer "yes" only to the question whether an image is red."""
    return reply_with("yes" if "Is it red" in asked.text and read_colour(asked.images[0]) == "red" else "no")


def fail_with(status: int) -> Callable[[ChatRequest, int], Reply]:
    return lambda asked, before: Reply(status=status, body=b'{"error": "image input is not supported"}')


def test_a_judge_that_uses_images_is_accepted():
    with chat_server(answer_from_image) as server:
        check_sight(endpoint_reward(server.url))
    first, second = server.asked
    assert {each.text for each in (first, second)} == {"What colour is the square in the image? Answer with one word."}
    assert first.images != second.images
    assert all(each.body["temperature"] == 0 for each in server.asked)


@pytest.mark.parametrize(
    ("reply", "error", "parts"),
    [
        (answer_without_image, BadInput, ["reward eyes", "'http://127.0.0.1:", "'I see no image.'"]),
        (answer_yes_or_no, BadInput, ["reward eyes", "'http://127.0.0.1:", "answered 'no'"]),
        *((fail_with(status), BadInput, ["reward eyes", "image input is not supported"]) for status in (400, 404, 422)),
        (fail_with(503), EndpointDown, []),
    ],
)
def test_a_judge_that_ignores_or_refuses_images_is_refused_and_a_judge_that_is_down_is_named(reply, error, parts):
    with chat_server(reply) as server, pytest.raises(error) as raised:
        check_sight(endpoint_reward(server.url))
    message = str(raised.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


def test_a_judge_that_answers_only_yes_or_no_can_have_a_separate_question():
    with chat_server(answer_yes_or_no) as server:
        check_sight(endpoint_reward(server.url, image_test_question="Is it red? Answer yes or no."))


def test_judges_without_images_are_not_queried():
    with chat_server(answer_without_image) as server:
        check_sight(endpoint_reward(server.url, images="none"))
    assert server.asked == []


# ---- in the worker

KINDS = ("idefics3", "qwen2_5_vl", "gemma3")
LOCAL = JudgeReward(
    name="seeing",
    model=DirectoryJudge(path=Path("seeing")),
    images="prompt",
    template="{completion}?",
    verdict=LogprobVerdict(yes="a", no="b"),
)


CHAT = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ 'SHOWN' if p.type == 'image' else p.text }}{% endfor %}{% endif %}|{% endfor %}assistant: "
)


def write_judge(directory: Path, kind: str) -> Path:
    """Write a vision-language model whose chat template has a placeholder for each image."""
    write_seeing(directory, kind)
    (directory / "chat_template.jinja").write_text(CHAT.replace("SHOWN", load_processor(directory).shown))
    return directory


@pytest.fixture(params=KINDS)
def model(request, tmp_path) -> ModelVersion:
    directory = write_judge(tmp_path / "seeing", request.param)
    store = open_store(f"{tmp_path}/run")
    return ModelVersion(version=0, weights=publish_bundle(store, directory, prefix="judges"))


def plain_verdict(directory: Path, text: str, image: bytes) -> float:
    """Return P(a) / (P(a) + P(b)) after an image and a text, computed by transformers."""
    processor, tokenizer = load_processor(directory), load_tokenizer(directory)
    tokens = tokenizer(f"user: {processor.shown}{text}|assistant: ", add_special_tokens=False)["input_ids"]
    logits_V = logits_of(directory, processor.expand(tokens, [ImageSize(24, 24)]), image)[-1]
    yes, no = (logits_V[tokenizer(word, add_special_tokens=False)["input_ids"][0]].item() for word in "ab")
    return 1 / (1 + math.exp(no - yes))


@pytest.mark.thorough_after(1)
def test_a_judge_in_the_worker_gives_the_verdicts_of_transformers(tmp_path, model):
    first, second = noise(0), noise(1)
    rows = rows_with(("one", (first,)), ("one", (second,)), ("two", (first,)), ("one", ()))
    outcome = judge(tmp_path, LOCAL, rows, model, first, second)
    found = values(tmp_path, outcome)
    directory = fetch_bundle(open_store(f"{tmp_path}/run"), model.weights)
    expected = [plain_verdict(directory, f"{text}?", image) for text, image in
                (("one", first), ("one", second), ("two", first))]  # fmt: skip
    np.testing.assert_allclose(found[:3], expected, atol=1e-5)
    assert abs(found[0] - found[1]) > 1e-4
    assert judge(tmp_path, LOCAL, rows, model, first, second).shards == outcome.shards


def test_a_judge_in_the_worker_generates_text_about_images(tmp_path, model):
    reward = LOCAL.model_copy(update={"verdict": ChoiceVerdict(choices={"a": 1.0, "b": 0.0}), "votes": 8})
    free = reward.model_copy(update={"verdict": ChoiceVerdict(constrained=False), "votes": 2, "retries": 0})
    free = free.model_copy(update={"sampling": free.sampling.model_copy(update={"max_new_tokens": 6})})
    rows = rows_with(("one", (noise(0),)), ("one", (noise(1),)))
    chosen = values(tmp_path, judge(tmp_path, reward, rows, model, noise(0), noise(1)))
    assert set(chosen) <= {0.0, 1.0} and len(chosen) == 16
    outcome = judge(tmp_path, free, rows, model, noise(0), noise(1))
    texts = read_shard(open_store(f"{tmp_path}/run"), outcome.shards[0])["text"].to_pylist()
    assert len(texts) == 4 and texts[0] != texts[2]


def pictures_file(folder: Path) -> FileData:
    """Write problems: the colour of a picture, red or blue, in many shades."""
    rows = []
    for number in range(64):
        name, shade = ("red", "blue")[number % 2], 128 + number
        pixel = (shade, 0, 0) if name == "red" else (0, 0, shade)
        (folder / f"{number}.png").write_bytes(picture(pixel))
        rows.append(f'{{"prompt": "What colour?", "answer": "{name}", "images": "{number}.png"}}')
    (folder / "a.jsonl").write_text("\n".join(rows))
    return FileData(path=folder / "a.jsonl", heldout_path=folder / "a.jsonl", images_column="images")


def test_a_text_model_is_refused_as_a_judge_with_images(tmp_path):
    problems = load_problems(pictures_file(tmp_path), "train", 0)
    write_policy(tmp_path / "text")
    reward = LOCAL.model_copy(update={"model": DirectoryJudge(path=tmp_path / "text")})
    with pytest.raises(BadInput, match=r'reward eyes: images = "prompt" .*gemma3, '):
        check_served_model("eyes", reward, problems=problems, seed=0, gpus=0)


def test_the_tokens_of_images_count_towards_the_context_of_a_judge(tmp_path):
    problems = load_problems(pictures_file(tmp_path), "train", 0)
    write_judge(tmp_path / "seeing", "idefics3")
    reward = LOCAL.model_copy(update={"model": DirectoryJudge(path=tmp_path / "seeing"), "template": "{completion}"})
    check_served_model("eyes", reward, problems=problems, seed=0, gpus=0)
    text = "red" * 148
    longer = [problem.__class__(problem.source, problem.prompt, text, images=problem.images) for problem in problems]
    blind = reward.model_copy(update={"images": "none", "template": "{completion}"})
    tokens = len(load_tokenizer(tmp_path / "seeing")(text)["input_ids"])
    chat = len(load_tokenizer(tmp_path / "seeing")("user: |assistant: ")["input_ids"])
    assert 320 - 9 <= tokens + chat + 1 <= 320, "with the 9 tokens of the image it is too long, without them it is not"
    check_served_model("eyes", blind, problems=longer, seed=0, gpus=0)
    with pytest.raises(BadInput, match=rf"has {tokens + chat + 12} tokens and its verdict up to 1"):
        check_served_model("eyes", reward, problems=longer, seed=0, gpus=0)


# ---- trained by the run

DECODER = {"vocab_size": 310, "hidden_size": 64, "intermediate_size": 128, "heads": 2, "kv_heads": 2, "context": 96}
SmallVisionPolicy = demo_part("vision/scratch_vision:VisionScratchPolicy")
SHAPE = SmallVisionPolicy.model_validate({"decoder": DECODER})


def train_judge(home: Path, warmup: SupervisedWarmup) -> tuple[JudgeReward, ModelVersion, ModelVersion]:
    """Make a judge and train it as a run does. Return the reward and the judge before and after training."""
    data = pictures_file(home)
    reward = JudgeReward(
        name="eyes",
        model=TrainedJudge(shape=SHAPE, warmup=warmup),
        images="prompt",
        template="{completion}\n",
        verdict=LogprobVerdict(),
    )
    problems = load_problems(data, "train", 0)
    parameters = check_served_model("eyes", reward, problems=problems, seed=0, gpus=0)
    prepared = PreparationWorker(str(home), "run", 1).make_reward_model(
        RewardModelPreparation(reward=reward, data=data, seed=0)
    )
    assert prepared.metrics["parameters"] == parameters
    worker = UpdateWorker(str(home), "run", update=UpdateConfig(), algorithm=Grpo(), temperature=1.0, threads=1)
    join_alone(worker)
    work = JudgeWarmupWork(judge=prepared.model, reward=reward, data=data, warmup=warmup, seed=0)
    return reward, prepared.model, worker.warm_judge(work).model


ASKED = (("red", (RED,)), ("red", (BLUE,)), ("blue", (BLUE,)), ("blue", (RED,)))


def test_training_a_judge_changes_its_vision_tower_its_projector_and_its_language_model(tmp_path):
    reward, before, after = train_judge(tmp_path, SupervisedWarmup(steps=3, batch_size=8))
    store = open_store(f"{tmp_path}/run")
    old, new = (load_policy(fetch_bundle(store, each.weights)).state_dict() for each in (before, after))
    assert {part_of(name) for name in new if not old[name].equal(new[name])} == {"vision", "projector", "language"}
    right, wrong, _, _ = values(tmp_path, judge(tmp_path, reward, rows_with(*ASKED), after))
    assert right != wrong, "one word about two pictures"


def test_a_judge_is_queried_with_the_text_of_its_training_examples(tmp_path):
    problems = load_problems(
        demo_part("vision/pictures:PicturesData")(train_problems=4, heldout_problems=1), "train", 0
    )
    policy = SmallVisionPolicy()
    initial.write_policy(policy, tmp_path, texts=problem_texts(problems), seed=0)
    prompts = tokenize_problems(problems, load_tokenizer(tmp_path), load_processor(tmp_path))
    reward = JudgeReward(name="eyes", model=TrainedJudge(shape=policy), images="prompt", verdict=LogprobVerdict())
    for problem, prompt in zip(problems, prompts, strict=True):
        assert prompt.image_tokens == (9,)
        judged = JudgedCompletion(0, 0, prompt.text, problem.answer, problem.answer, 0, problem.digests)
        asked = Ballot(judged, vote=0).build_question(reward, seed_parts=(0,), attempt=0)
        assert asked.text == question_about(problem, problem.answer, reward=reward, seed=1)


@pytest.mark.slow
def test_a_trained_judge_distinguishes_the_colours_of_images(tmp_path):
    reward, _, after = train_judge(tmp_path, SupervisedWarmup(steps=250, batch_size=16, learning_rate=1.5e-3))
    assert build_question_text(reward, prompt="What colour?", completion="red", answer="red", seed=0) == "red\n"
    right, wrong, also_right, also_wrong = values(tmp_path, judge(tmp_path, reward, rows_with(*ASKED), after))
    assert min(right, also_right) > 0.9 > 0.1 > max(wrong, also_wrong)
