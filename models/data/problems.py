"""A problem, which split it belongs to, and how those of a split are made or read."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from blake3 import blake3
from pydantic import JsonValue

from infra.errors import BadInput
from infra.plugins import find_target
from infra.variants import implementation_of
from models.config.data import DataConfig
from models.data.images import digest_of


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Where a message shows the next of its problem's images."""


Content = str | tuple[str | ImagePlace, ...]
"""Text, or texts with images between them."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: Content
    name: str = ""
    """Of the tool that answers, if one does."""

    @property
    def text(self) -> str:
        """Its text, without images."""
        parts = (self.content,) if isinstance(self.content, str) else self.content
        return "".join(part for part in parts if isinstance(part, str))

    def spelt(self) -> dict[str, Any]:
        """Spell it as chat templates read it."""
        content = self.content if isinstance(self.content, str) else [_spelt_part(part) for part in self.content]
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


def _spelt_part(part: str | ImagePlace) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


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
    worked_turns: tuple[str, ...] = ()
    """The same of an episode: the policy's turns, and between them what the environment says to them."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """What the prompt shows, encoded as it came, in order."""
    columns: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    """What an environment is told of it beside prompt and answer."""
    part: int = 0
    """Which of its source's parts it is of, where these are drawn from by weight (`DataSource.weights`)."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Names of the images."""
        return tuple(map(digest_of, self.images))

    @property
    def identity(self) -> str:
        """Spell what it asks, shows and tells environments as one text that stands for it in hashes and comparisons."""
        return identity(self.prompt, self.digests, self.columns)


class ProblemSource(Protocol):
    """Where problems come from: the same arguments give the same problems in the same order, none in both splits."""

    def __call__(self, data: Any, split: str, seed: int, /) -> Iterable[Problem]:  # noqa: ANN401 -- the source's own settings
        """Make or read the problems of a split, `train` or `heldout`."""
        ...


class LeftOut(Protocol):
    """Says which training problems a source leaves out by itself."""

    def __call__(self, data: Any, seed: int, /) -> dict[str, str]:  # noqa: ANN401 -- the source's own settings
        """Why, by where they came from."""
        ...


def left_out_of(data: DataConfig, seed: int) -> dict[str, str]:
    """Say which training problems a source leaves out by itself, by where they came from, and why."""
    if not data.left_out:
        return {}
    return cast(LeftOut, find_target(data.left_out, where=f"data {data.known_as!r}"))(data, seed)


def is_heldout(text: str, share: float) -> bool:
    """Say whether a text is kept for evaluation; depends on nothing but the text, so a problem never changes sides."""
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big") < share * 2**64


def identity(prompt: Prompt, images: Sequence[str] = (), columns: Mapping[str, JsonValue] = {}) -> str:
    """Spell a prompt, and the digests of what it shows, as one text that stands for it in hashes and comparisons.

    `columns` are what an environment is told beside it.
    """
    if isinstance(prompt, str):
        text = prompt
    else:
        text = json.dumps([[*turn.spelt().values()] for turn in prompt], ensure_ascii=False)
    if columns:
        return json.dumps([text, list(images), spelt_columns(columns)], ensure_ascii=False)
    return json.dumps([text, list(images)], ensure_ascii=False) if images else text


def spelt_columns(columns: Mapping[str, JsonValue]) -> str:
    """Spell what an environment is told as JSON, in one way."""
    return json.dumps(columns, ensure_ascii=False, sort_keys=True, allow_nan=False)


def check_columns(columns: Mapping[str, JsonValue], *, source: str) -> None:
    """Refuse what JSON does not spell."""
    for name, value in columns.items():
        try:
            spelt_columns({name: value}).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise BadInput(f"{source}: {name}: expected a JSON value, found {value!r:.60}") from error


def check_places(prompt: Prompt, images: int, *, source: str) -> None:
    """Refuse a chat that says where images are, but not for as many as there are."""
    places = num_places(prompt)
    if places and places != images:
        raise BadInput(f"{source}: the messages have places for {places} images, found {images}")


def num_places(prompt: Prompt) -> int:
    """Count the places for images; none where the prompt does not say where they are."""
    if isinstance(prompt, str):
        return 0
    return sum(
        isinstance(part, ImagePlace) for turn in prompt if not isinstance(turn.content, str) for part in turn.content
    )


def with_places(prompt: tuple[Message, ...], images: int) -> tuple[Message, ...]:
    """Say where images are: where the chat says so, else before the user's first text. Every content is in parts."""
    missing = images - num_places(prompt)
    turns: list[Message] = []
    for turn in prompt:
        parts = (turn.content,) if isinstance(turn.content, str) else turn.content
        if missing and (turn.role == "user" or turn is prompt[-1]):
            parts, missing = (*[ImagePlace()] * missing, *parts), 0
        turns.append(Message(turn.role, parts))
    return tuple(turns)


def fill_prompt(prompt: Prompt, template: str) -> Prompt:
    """Put plain text into the template; chats have the tokenizer's own."""
    return template.replace("{prompt}", prompt) if isinstance(prompt, str) else prompt


def with_system(prompt: Prompt, text: str) -> Prompt:
    """Put a system message before a chat that has none; plain text becomes what the user says."""
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return chat if chat[0].role == "system" else (Message("system", text), *chat)


HELDOUT_SHARE: Final = 0.1
"""Of problems that are made."""
MAX_FRUITLESS_DRAWS: Final = 5000
"""One draw in ten is a held-out problem; so many in a row without a new one mean that they have run out."""


def draw_problems(draw: Callable[[str], Problem], *, split: str, wanted: int) -> list[Problem]:
    """Have different problems of a split made, each told its source; fewer than wanted where they run out."""
    found: dict[str, Problem] = {}
    fruitless = 0
    while len(found) < wanted and fruitless < MAX_FRUITLESS_DRAWS:
        problem = draw(f"{split} problem {len(found)}")
        name = problem.identity
        is_new = name not in found and is_heldout(name, HELDOUT_SHARE) == (split == "heldout")
        fruitless = 0 if is_new else fruitless + 1
        if is_new:
            found[name] = problem
    return list(found.values())


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
        check_columns(problem.columns, source=problem.source)
    return problems
