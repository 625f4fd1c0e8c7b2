"""Dialogues as the model reads them that plays the user: its own part is the assistant's, the policy's the user's.

It is also where such a model learns from: the worked episodes of the data. Torch-free.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from pydantic import JsonValue

from infra.errors import BadInput
from models.config.data import DataConfig
from models.config.environments import DialogueEnvironment
from models.config.training import WarmupConfig
from models.data.examples import Example
from models.data.problems import Message, Problem, identity, load_problems

_FIELD: Final = re.compile(r"\{(\w+)\}")

Told = Mapping[str, JsonValue]
"""What an environment is told of a problem: its prompt, its answer and its columns."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A dialogue up to a turn of the policy, which the user is to answer."""

    instructions: str
    turns: tuple[str, ...]
    """The policy's."""
    replies: tuple[str, ...]
    """The user's, one to each turn but the last."""

    @property
    def text(self) -> str:
        """As plain text: one after the other, with nothing between them."""
        said = (part for pair in zip(self.turns, (*self.replies, ""), strict=True) for part in pair)
        return "".join((self.instructions, *said))

    @property
    def messages(self) -> tuple[Message, ...]:
        """As a chat."""
        said = [Message("system", self.instructions)]
        for turn, reply in zip(self.turns, (*self.replies, ""), strict=True):
            said += [Message("user", turn), Message("assistant", reply)]
        return tuple(said[:-1])


def told_of(problem: Problem) -> dict[str, JsonValue]:
    """Say what an environment is told of a problem, before its prompt is rendered."""
    return {**problem.columns, "prompt": identity(problem.prompt), "answer": problem.answer}


def instructed(template: str, problem: Told) -> str:
    """Fill a problem into instructions; other braces stand for themselves. Raises ValueError with the nearest name.

    >>> instructed("A box of {size}. {}", {"size": 7})
    'A box of 7. {}'
    """

    def filled(field: re.Match[str]) -> str:
        name = field[1]
        if name not in problem:
            near = difflib.get_close_matches(name, problem, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"instructions: the problem has no {name!r}{hint} (it has {', '.join(sorted(problem))})")
        value = problem[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _FIELD.sub(filled, template)


def user_examples(
    environment: DialogueEnvironment, data: DataConfig, *, warmup: WarmupConfig, seed: int
) -> list[Example]:
    """Draw the examples of all training steps, in order: what worked episodes say to each turn. Raises BadInput."""
    known = [*worked_replies(environment, load_problems(data, "train", seed))]
    rng = Random(f"{seed}/user")
    chosen = (rng.choice(known) for _ in range(warmup.steps * warmup.batch_size))
    return [Example(transcript.text, reply) for transcript, reply in chosen]


def user_texts(environment: DialogueEnvironment, problems: Iterable[Problem]) -> Iterator[str]:
    """List what such a model's tokenizer learns from: dialogues and replies. Raises BadInput."""
    for transcript, reply in worked_replies(environment, problems):
        yield transcript.text
        yield reply


def worked_replies(environment: DialogueEnvironment, problems: Iterable[Problem]) -> Iterator[tuple[Transcript, str]]:
    """Read the worked episodes of problems from the user's side. Raises BadInput where a problem has none."""
    for problem in problems:
        if len(problem.worked_turns) < 2:
            raise BadInput(
                f"{problem.source}: expected a worked episode, which a user of kind 'trained' learns from, found none; "
                "use data that has them, or a model that needs no training"
            )
        try:
            instructions = instructed(environment.instructions, told_of(problem))
        except ValueError as error:
            raise BadInput(f"{problem.source}: {error}") from error
        turns, replies = problem.worked_turns[::2], problem.worked_turns[1::2]
        for number, reply in enumerate(replies):
            yield Transcript(instructions, turns[: number + 1], replies[:number]), reply
