"""A problem, which split it belongs to, and how those of a split are made or read."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from blake3 import blake3

from infra.errors import BadInput
from infra.variants import implementation_of
from models.config.data import DataConfig


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""Plain text, or a chat that the tokenizer's template renders."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What the policy is asked, and what rewards compare its completion with."""

    source: str
    """Where it came from, for messages: `train.jsonl:17`."""
    prompt: Prompt
    answer: str
    """Reference answer; empty where the data has none."""
    worked: str | None = None
    """Worked solution that ends in the answer."""


class ProblemSource(Protocol):
    """Where problems come from: the same arguments give the same problems in the same order, none in both splits."""

    def __call__(self, data: Any, split: str, seed: int, /) -> Iterable[Problem]:  # noqa: ANN401 -- the source's own settings
        """Make or read the problems of a split, `train` or `heldout`."""
        ...


def is_heldout(text: str, share: float) -> bool:
    """Say whether a text is kept for evaluation; depends on nothing but the text, so a problem never changes sides."""
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big") < share * 2**64


def identity(prompt: Prompt) -> str:
    """Spell a prompt as one text that stands for it in hashes and comparisons."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps([(turn.role, turn.content) for turn in prompt], ensure_ascii=False)


def fill_prompt(prompt: Prompt, template: str) -> Prompt:
    """Put plain text into the template; chats have the tokenizer's own."""
    return template.replace("{prompt}", prompt) if isinstance(prompt, str) else prompt


def load_problems(data: DataConfig, split: str, seed: int) -> list[Problem]:
    """Load the `train` or `heldout` problems in a fixed order; no prompt is in both."""
    assert split in ("train", "heldout"), split
    where = f"data {data.known_as!r}: its {split} problems"
    try:
        problems = [*cast(ProblemSource, implementation_of(data))(data, split, seed)]
    except BadInput:
        raise
    except Exception as error:  # whatever a user's source raises means that there is nothing to learn from
        raise BadInput(f"{where}: making them failed: {type(error).__name__}: {error}") from error
    for problem in problems:
        if not isinstance(problem, Problem):
            raise BadInput(f"{where}: expected models.data.problems.Problem each, found {problem!r:.80}")
    return problems
