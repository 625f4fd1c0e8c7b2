"""Command that lists the kinds of rewards. It imports neither Prefect nor torch."""

import json
import textwrap
from inspect import getdoc
from typing import Annotated, Final

from cyclopts import Parameter

from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import WIDTH, Json, write

Kind = Annotated[str | None, Parameter(name="KIND", show_default="all kinds", help="kind of reward to describe")]

_INDENT: Final = "    "


def rewards(kind: Kind = None, /, *, as_json: Json = False) -> None:
    """List the kinds of rewards, each with a description and an example."""
    from rheostat.infra.validation_errors import nearest
    from rheostat.models.config.rewards import REWARD_CLASSES

    classes = {each.model_fields["kind"].default: each for each in REWARD_CLASSES}
    if kind is not None and kind not in classes:
        raise BadInput(f"{kind!r} is not a kind of reward. Kinds: {', '.join(classes)}{nearest(kind, [*classes])}")
    chosen = classes if kind is None else {kind: classes[kind]}
    if as_json:
        items = [
            {"kind": name, "description": " ".join(_describe(each).split()), "example": each.example}
            for name, each in chosen.items()
        ]
        write(json.dumps(items, indent=2))
        return
    for name, each in chosen.items():
        description = _describe(each) if kind else _first_sentence(_describe(each))
        write(f"{name}\n{_indent(description)}\n{_INDENT}{each.example}")
    write(
        "\nAdd a reward to a job with [scoring] and rewards = [EXAMPLE, ...]. For the description of one kind run "
        "`rheostat rewards KIND`. All keys are listed in docs/configuration.md."
    )


def _describe(reward: type) -> str:
    return getdoc(reward) or ""


def _first_sentence(text: str) -> str:
    """Return the first sentence of a text on one line. The sentence ends at a full stop that is followed by a capital
    letter."""
    words = " ".join(text.split("\n\n")[0].split()).split(" ")
    for at, word in enumerate(words[:-1]):
        if word.endswith(".") and words[at + 1][0].isupper():
            return " ".join(words[: at + 1])
    return " ".join(words)


def _indent(text: str) -> str:
    """Wrap the paragraphs of a text to the terminal's width, and indent them."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(
        textwrap.fill(paragraph, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT) for paragraph in paragraphs
    )
