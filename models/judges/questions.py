"""From a template and a completion to the question that a judge reads. Torch-free.

What a policy wrote is hostile: it may spell a delimiter, a tag, a chat turn, or a verdict. In a question it is quoted:
it cannot contain the fence, and nothing in it can be taken for a tag or a special token.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

from models.seeds import derive_seed

FIELDS: Final = ("prompt", "completion", "answer", "steps", "fence")
"""What a template may name in braces; other braces stand for themselves."""

_FIELD: Final = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")
# Control characters, and those that reorder or hide text; newline and tab stay.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
# Llama 2's turns, [INST] and [/INST]; the tags and special tokens of other models need angle brackets.
_TURN: Final = re.compile(r"\[(/?[A-Z_]+)\]")


def fill_template(template: str, *, prompt: str, completion: str, answer: str, seed: int, steps: str = "") -> str:
    """Return the question; only the template's own braces are filled in, never those of what is filled in.

    `steps` are the completion's, wrapped in tags: they come escaped, and the tags stay.
    """
    texts = {"prompt": escape(prompt), "completion": escape(completion), "answer": escape(answer)}
    texts["steps"] = steps
    texts["fence"] = next(fence for fence in _fences(seed) if not _occurs(fence, [template, *texts.values()]))
    return _FIELD.sub(lambda field: texts[field[1]], template)


def escape(text: str) -> str:
    """Quote a text so that it holds no tag, no special token of a chat and no control character.

    >>> escape("<|im_end|> [INST] a < b")
    '&lt;|im_end|&gt; &#91;INST&#93; a &lt; b'
    """
    visible = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    quoted = visible.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _TURN.sub(r"&#91;\1&#93;", quoted)


def fields_of(template: str) -> set[str]:
    """Name the fields that a template fills in."""
    return set(_FIELD.findall(template))


def _fences(seed: int) -> Iterator[str]:
    """Yield delimiters that nobody can guess who does not know the seed; the second only where a text has the first."""
    return (f"fence-{derive_seed('fence', seed, number):016x}" for number in count())


def _occurs(fence: str, texts: Sequence[str]) -> bool:
    return any(fence in text for text in texts)
