"""Worked examples for training before the first iteration, generated from problems or read from a file."""

from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple, Protocol, cast

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import find_target
from rheostat.models.config.data import DataConfig
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.data.images import convert_image
from rheostat.models.data.problems import (
    NO_ARGUMENTS,
    Problem,
    Prompt,
    TemplateArguments,
    load_problems,
)


class Example(NamedTuple):
    """Example for warm-up (supervised fine-tuning): a prompt, and the completion on which the model is trained."""

    prompt: Prompt
    completion: str
    images: tuple[bytes, ...] = ()
    """Encoded image files of the prompt, in order."""
    verdict: str = ""
    """Verdict at the end of a completion with which a judge is trained. In the loss it has the same weight as all text
    before it together. Empty for other completions."""
    continuation: tuple[str, ...] = ()
    """Rest of an episode after its first turn: a reply of the environment and a turn of the policy, alternately. Only
    the turns of the policy are trained on."""
    template: TemplateArguments = NO_ARGUMENTS
    """Arguments of the chat template, if the prompt is a chat."""


def warmup_examples(
    data: DataConfig,
    warmup: SupervisedWarmup,
    seed: int,
    *,
    among: Callable[[list[Problem]], list[Problem]] | None = None,
) -> list[Example]:
    """Return the examples of all warm-up steps in training order. Each epoch contains all training problems in another
    random order.

    `among`, if given, selects the training problems to use. Raises BadInput if the data has no answers.
    """
    problems = load_problems(data, "train", seed)
    problems = problems if among is None else among(problems)
    if not data.has_answers:
        raise BadInput(
            "[warmup] trains on reference answers, but the data has none. Set data.answer_column or remove [warmup]."
        )
    rng = Random(f"{seed}/warmup")
    num_examples = warmup.steps * warmup.batch_size
    examples: list[Example] = []
    while len(examples) < num_examples:
        passing = rng.sample(problems, k=min(len(problems), num_examples - len(examples)))
        examples.extend(
            Example(problem.prompt, completion, problem.images, continuation=tuple(more), template=problem.template)
            for problem in passing
            for completion, *more in [_imitated(problem, data, warmup.worked_answer_fraction, rng)]
        )
    return examples


class PictureSource(Protocol):
    """Function that generates or reads pictures for warm-up, called by `picture_examples`. The same arguments give the
    same pictures."""

    def __call__(self, data: Any, count: int, seed: int, /) -> list[tuple[str, bytes]]:  # noqa: ANN401 -- settings differ by kind
        """Return pairs of a caption and an encoded picture."""
        ...


MAX_PICTURES: Final = 4096
"""Maximum number of distinct pictures for a warm-up. Longer warm-ups repeat them."""


def picture_examples(data: DataConfig, warmup: SupervisedWarmup, seed: int) -> list[tuple[str, bytes]]:
    """Return the captions and encoded pictures of all warm-up steps in training order. Each epoch contains all pictures
    in another random order.

    Raises BadInput if the data source has no pictures, or a picture cannot be decoded.
    """
    if not data.pictures:
        raise BadInput(
            f"[warmup] of a text-to-image policy trains on pictures, but data.kind = {data.label!r} provides none. "
            "Remove [warmup], or use a data source of your own with pictures."
        )
    num_examples = warmup.steps * warmup.batch_size
    make = cast(PictureSource, find_target(data.pictures, where=f"data.kind {data.label!r}"))
    pictures, rng = make(data, min(num_examples, MAX_PICTURES), seed), Random(f"{seed}/warmup")
    if data.image_background != "unconverted":
        pictures = [
            (
                caption,
                convert_image(
                    picture,
                    data.image_background,
                    where=f"warmup: the picture of {caption!r}",
                    rounds_color=data.image_version > 1,
                ),
            )
            for caption, picture in pictures
        ]
    examples: list[tuple[str, bytes]] = []
    while len(examples) < num_examples:
        examples.extend(rng.sample(pictures, k=min(len(pictures), num_examples - len(examples))))
    return examples


def _imitated(problem: Problem, data: DataConfig, worked_fraction: float, rng: Random) -> tuple[str, ...]:
    """Return the completion of a problem on which warm-up trains. It is the worked solution (as one text, or as the
    turns of an episode) or an answer that is a random guess.

    `worked_fraction` is the probability of the worked solution. If the problem has no worked solution, the reference
    answer alone is returned.
    """
    if problem.worked is None:
        return (problem.answer,)
    if rng.random() < worked_fraction:
        return problem.worked_turns or (problem.worked,)
    return (data.guess_template.format(rng.randint(0, data.max_guess)),)
