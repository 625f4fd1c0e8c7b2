"""Checks of images before a run begins: whether they can be decoded, and whether models and reward functions accept
them.

This module does not import torch.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import Final

from PIL import Image

from rheostat.infra.errors import BadInput, InputErrors, WorkerFailed
from rheostat.infra.store.inputs import fetch_path
from rheostat.models.config.images import PixelLimits
from rheostat.models.config.judges import EndpointJudge, JudgeReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.teachers import TEACHER_KEY, Teacher
from rheostat.models.config.verdicts import ScoreVerdict
from rheostat.models.data.images import check_pixels, digest_of, read_header
from rheostat.models.data.problems import Problem, identity
from rheostat.models.judges.endpoint import ChatJudge
from rheostat.models.judges.verdicts import Answer, Question
from rheostat.models.records.media import InMemoryImages
from rheostat.models.rewards.evaluate import Case, Evaluator, check_image_parameters
from rheostat.models.vision.pixels import load_limited_processor
from rheostat.models.vision.processor import VisionProcessor

SQUARES: Final = ("red", "blue")
SIDE: Final = 224
"""Width and height in pixels of the square test images. All model families accept this size."""


def check_images(
    problems: Sequence[Problem], processor: VisionProcessor | None, *, allows_missing: bool = False
) -> None:
    """Check that the images of problems can be decoded and used by the policy whose image processor is `processor`.
    Raises BadInput with the places of all images that cannot be used.

    Each distinct image is decoded once, because its header alone does not show whether the file is complete. With
    `allows_missing`, missing pixels that Pillow fills are allowed.
    """
    places = {
        encoded: problem.find_image(number) for problem in problems for number, encoded in enumerate(problem.images)
    }
    input_errors = InputErrors()
    for encoded, where in places.items():
        with input_errors.collect(where):
            check_pixels(encoded, where=where, allows_missing=allows_missing)
            _check_processor(encoded, processor, where=where)
    input_errors.check()


def _check_processor(encoded: bytes, processor: VisionProcessor | None, *, where: str) -> None:
    try:
        if processor is not None:
            processor.check(encoded)
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from error


def check_reward_images(scoring: ScoringConfig, problems: Sequence[Problem], *, generates_images: bool = False) -> None:
    """Check that problems contain the images that judges need, and that reward functions accept them. If
    `generates_images` is true, the policy generates images, and every reward function must accept images. Raises
    BadInput if a check fails."""
    if generates_images:
        check_image_parameters(scoring)
        return
    example = next((problem for problem in problems if problem.images), None)
    for term, reward in scoring.model_rewards.items():
        if reward.kind == "judge" and reward.images == "prompt" and example is None:
            raise BadInput(
                f'reward {term}: images = "prompt" shows the images of the problems to the judge, but no problem has '
                "any. Remove the key, or set data.images_column."
            )
    targets = [rule for rule in scoring.rules if rule.brings_code]
    if example is not None and targets:
        _check_functions(scoring.model_copy(update={"rewards": tuple(targets)}), example)


def check_warmup_images(examples: Sequence[tuple[str, bytes]], *, side: int) -> None:
    """Raise BadInput if an image for the warm-up is not a square of `side` pixels, the size of the images that the
    policy will generate. Each example is a pair of the image's origin and its file."""
    for caption, picture in examples:
        if (size := read_header(picture, where=f"picture of {caption!r}").size) != (side, side):
            raise BadInput(
                f"[warmup]: the picture of {caption!r} has {size[0]} x {size[1]} pixels, but the policy "
                f"generates images of {side} x {side} pixels. Resize the pictures, or change the policy's size."
            )


def _check_functions(scoring: ScoringConfig, problem: Problem) -> None:
    """Call each reward function that accepts images once, with the images and the reference answer of a problem, so
    that errors appear before the run begins."""
    answer = problem.worked or problem.answer
    case = Case(identity(problem.prompt), answer, problem.answer, tokens=(answer,), images=problem.digests)
    evaluator = Evaluator(scoring)
    try:
        failure = evaluator.try_images(case, InMemoryImages(dict(zip(problem.digests, problem.images, strict=True))))
    finally:
        evaluator.close()
    if failure is not None:
        raise BadInput(
            f"reward {failure} (tested with the images and the reference answer of {problem.source}). Correct the "
            "reward function."
        )


def check_teacher_images(
    teacher: Teacher,
    problems: Sequence[Problem],
    processor: VisionProcessor | None,
    *,
    limits: PixelLimits,
    where: str = TEACHER_KEY,
) -> None:
    """Raise BadInput if the teacher cannot score prompts with images. The teacher must encode each image as the same
    tokens as the policy, whose image processor is `processor`. `where` is the configuration key of the teacher."""
    with_images = [problem for problem in problems if problem.images]
    if not with_images or processor is None:
        return
    prompt = f"{where}: the prompt {with_images[0].source} has images"
    if teacher.local_model is None:
        raise BadInput(
            f"{prompt}, which teachers behind an endpoint do not support. Use a teacher of kind 'directory'."
        )
    own = load_limited_processor(fetch_path(teacher.local_model.path), limits)
    if own is None:
        raise BadInput(f"{prompt}, but the teacher reads only text. Use a vision-language model as the teacher.")
    encoded = {image: problem.source for problem in with_images for image in problem.images}
    sizes = {read_header(image, where=source).size: source for image, source in encoded.items()}
    for size, source in sizes.items():
        if own.encode_image(size) != processor.encode_image(size):
            raise BadInput(
                f"{where}: an image of {source} with {size.width} x {size.height} pixels "
                f"becomes {own.count_tokens(size)} tokens for the teacher but {processor.count_tokens(size)} for the "
                "policy. Both must read the same tokens, so the settings of their image processors must be equal. Use "
                "a teacher with the policy's preprocessor_config.json."
            )


def check_judge_images(scoring: ScoringConfig) -> None:
    """Check that judges behind endpoints receive images, by sending the same question with a red and with a blue
    square.

    Raises BadInput if a judge gives equal answers or no answer, and EndpointDown if an endpoint is not available now.
    """
    for term, reward in scoring.model_rewards.items():
        if reward.kind == "judge" and reward.images == "prompt" and reward.endpoint is not None:
            _check_judge_sees(term, reward, reward.endpoint)


def _check_judge_sees(term: str, reward: JudgeReward, endpoint: EndpointJudge) -> None:
    greedy = reward.sampling.model_copy(update={"temperature": 0.0})
    judge = ChatJudge(endpoint, sampling=greedy, verdict=ScoreVerdict())  # free text, whatever verdict is configured
    squares = {digest_of(encoded): encoded for encoded in map(_draw_square, SQUARES)}
    judge.show(InMemoryImages(squares))
    try:
        answers = judge.answer([Question(reward.image_test_question, seed=0, images=(digest,)) for digest in squares])
    except WorkerFailed as error:
        raise BadInput(
            f'reward {term}: images = "prompt" is set, but the judge rejects images: {error}. Use a vision-language '
            "model as the judge."
        ) from error
    texts = [_require_answer(term, colour, answer) for colour, answer in zip(SQUARES, answers, strict=True)]
    if len({text.casefold().strip(" \t\n.,;:!\"'`*") for text in texts}) == 1:
        raise BadInput(
            f"reward {term}: the judge at {endpoint.base_url!r} seems to ignore images: it answered {texts[0]!r:.80} "
            f"to {reward.image_test_question!r} about a red square and about a blue one. Use a vision-language model, "
            "or set an image_test_question that the model can answer."
        )


def _draw_square(colour: str) -> bytes:
    sink = BytesIO()
    Image.new("RGB", (SIDE, SIDE), colour).save(sink, "PNG")
    return sink.getvalue()


def _require_answer(term: str, colour: str, answer: Answer) -> str:
    if answer.error is not None:
        raise BadInput(
            f"reward {term}: the judge did not answer a test question about the image of a {colour} square: "
            f"{answer.error}. Check the endpoint, or use a vision-language model."
        )
    return answer.text or ""
