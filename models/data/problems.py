"""A problem, and which split it belongs to."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3


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
