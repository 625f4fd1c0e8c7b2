"""Dialogues from a simulated user's view, in which the model plays the assistant role and the policy the user role.

This module also builds the training examples of a simulated user from the worked episodes in the data. It does not
import torch.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from pydantic import JsonValue

from rheostat.infra.errors import BadInput
from rheostat.models.config.data import DataConfig
from rheostat.models.config.episodes import DialogueEnvironment
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.data.examples import Example
from rheostat.models.data.problems import Message, Problem, identity, load_problems

_FIELD: Final = re.compile(r"\{(\w+)\}")

ProblemData = Mapping[str, JsonValue]
"""Data of a problem that an environment receives: the prompt, the answer and the other columns of the row."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """Dialogue from its start up to a turn of the policy, to which the simulated user replies next."""

    instructions: str
    turns: tuple[str, ...]
    """Texts of the policy's turns, in order."""
    replies: tuple[str, ...]
    """Replies of the simulated user, one for each turn except the last."""

    @property
    def text(self) -> str:
        """Dialogue as plain text: instructions, turns and replies, concatenated without separators."""
        parts = (part for pair in zip(self.turns, (*self.replies, ""), strict=True) for part in pair)
        return "".join((self.instructions, *parts))

    @property
    def messages(self) -> tuple[Message, ...]:
        """Dialogue as chat messages from the view of the simulated user: the policy's turns have the role `user`, and
        the simulated user's replies the role `assistant`."""
        messages = [Message("system", self.instructions)]
        for turn, reply in zip(self.turns, (*self.replies, ""), strict=True):
            messages += [Message("user", turn), Message("assistant", reply)]
        return tuple(messages[:-1])


def build_problem_data(problem: Problem) -> dict[str, JsonValue]:
    """Return the data of a problem that an environment receives: the prompt, the answer and the other columns."""
    return {**problem.columns, "prompt": identity(problem.prompt), "answer": problem.answer}


def fill_instructions(template: str, problem: ProblemData) -> str:
    """Replace each `{field}` in the instructions by the problem's value. Braces without a field name are kept as text.

    Raises ValueError if the problem has no such field; the message suggests the nearest name.

    >>> fill_instructions("A box of {size}. {}", {"size": 7})
    'A box of 7. {}'
    """

    def filled(field: re.Match[str]) -> str:
        """Return the value of a field. Values other than text are written as JSON."""
        name = field[1]
        if name not in problem:
            near = difflib.get_close_matches(name, problem, n=1)
            hint = f", did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"rollout.environment.instructions contains {{{name}}}, but the problem has no field {name!r}{hint} "
                f"The fields of the problem are {', '.join(sorted(problem))}."
            )
        value = problem[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _FIELD.sub(filled, template)


def user_examples(
    environment: DialogueEnvironment, data: DataConfig, *, warmup: SupervisedWarmup, seed: int
) -> list[Example]:
    """Sample the examples on which a simulated user is trained, for all training steps in order. Each example is one
    reply in a worked episode (an example dialogue in the data).

    Raises BadInput if a problem has no worked episode.
    """
    replies = [*worked_replies(environment, load_problems(data, "train", seed))]
    rng = Random(f"{seed}/user")
    chosen = (rng.choice(replies) for _ in range(warmup.steps * warmup.batch_size))
    return [Example(transcript.text, reply) for transcript, reply in chosen]


def user_texts(environment: DialogueEnvironment, problems: Iterable[Problem]) -> Iterator[str]:
    """Yield the texts on which the tokenizer of a simulated user is trained: the transcripts and replies of worked
    episodes (example dialogues in the data).

    Raises BadInput if a problem has no worked episode.
    """
    for transcript, reply in worked_replies(environment, problems):
        yield transcript.text
        yield reply


def worked_replies(environment: DialogueEnvironment, problems: Iterable[Problem]) -> Iterator[tuple[Transcript, str]]:
    """Yield each reply in the problems' worked episodes (example dialogues in the data), with the transcript that
    precedes it.

    Raises BadInput if a problem has no worked episode or the instructions name a field that a problem lacks.
    """
    for problem in problems:
        if len(problem.worked_turns) < 2:
            raise BadInput(
                f"{problem.source}: rollout.environment.model.kind = 'trained' trains the simulated user on worked "
                "episodes, but this problem has none. Use data with worked episodes, or a model that needs no "
                "training."
            )
        try:
            instructions = fill_instructions(environment.instructions, build_problem_data(problem))
        except ValueError as error:
            raise BadInput(f"{problem.source}: {error}") from error
        turns, replies = problem.worked_turns[::2], problem.worked_turns[1::2]
        for number, reply in enumerate(replies):
            yield Transcript(instructions, turns[: number + 1], replies[:number]), reply
