"""Problems (tasks for the policy), their splits, and the interface of the sources that generate or read them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, cast

from blake3 import blake3
from pydantic import JsonValue

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.plugins import find_target
from rheostat.infra.variants import implementation_of
from rheostat.models.config.data import DataConfig
from rheostat.models.data.canonical import canonicalize_columns, canonicalize_text, drop_absent, fold_text, map_texts
from rheostat.models.data.images import convert_image, digest_of


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Placeholder in the content of a message, at which the next image of the problem is inserted."""


Content = str | tuple[str | ImagePlace, ...] | None
"""Content of a message: text, or a sequence of texts and images. None for a message with only tool calls."""


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a chat: its role, its content, and other fields such as tool calls."""

    role: str
    content: Content
    name: str = ""
    """Name of the tool or person that wrote the message. Empty if it has none."""
    fields: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    """Other fields that chat templates use, such as `tool_calls`, by name (`rheostat.models.data.messages.FIELDS`)."""

    @property
    def parts(self) -> tuple[str | ImagePlace, ...]:
        """Texts and image placeholders of the content, in order."""
        return (self.content,) if isinstance(self.content, str) else self.content or ()

    @property
    def text(self) -> str:
        """All texts of the message joined, without its images."""
        return "".join(part for part in self.parts if isinstance(part, str))

    def encode(self) -> dict[str, Any]:
        """Return the message as an object for chat templates. It has no key `content` if the content is None."""
        content = self.content if isinstance(self.content, str) else [_encode_part(part) for part in self.parts]
        contents = {} if self.content is None else {"content": content}
        return {"role": self.role, **contents} | ({"name": self.name} if self.name else {}) | {**self.fields}

    def values(self) -> list[JsonValue]:
        """Return the values by which the message is identified: role, content and name, and `fields` if there are any.

        The values do not depend on the format of the file: nulls are absent, and arguments of calls are objects.
        """
        values: list[JsonValue] = [self.role, replace(self, fields={}).encode().get("content")]
        values += [self.name] if self.name else []
        return [*values, encode_columns(drop_absent(_parse_arguments(self.fields)))] if self.fields else values


def _parse_arguments(value: Any, name: str = "") -> Any:  # noqa: ANN401 -- a field of a message
    """Return a field of a message in which arguments of tool calls that are JSON text are replaced by the object."""
    match value:
        case Mapping():
            return {key: _parse_arguments(each, key) for key, each in value.items()}
        case list():
            return [_parse_arguments(each) for each in value]
        case str() if name == "arguments":
            with suppress(ValueError):
                return json.loads(value)
    return value


def _encode_part(part: str | ImagePlace) -> dict[str, str]:
    """Return a text or an image placeholder as a content part for chat templates."""
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


Prompt = str | tuple[Message, ...]
"""Prompt of a problem: plain text, or a chat that the tokenizer's chat template renders."""


@dataclass(frozen=True, slots=True)
class TemplateArguments:
    """Arguments with which the chat template renders one prompt, in addition to the messages."""

    tools: tuple[Mapping[str, JsonValue], ...] = field(default=(), hash=False)
    """JSON schemas of the tools that the prompt describes to the policy."""
    kwargs: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    """Variables for the chat template, by name, such as `enable_thinking`."""

    def with_default_tools(self, tools: Sequence[Mapping[str, JsonValue]]) -> "TemplateArguments":
        """Return these arguments with the given tools added, if they contain no tools."""
        return self if self.tools or not tools else replace(self, tools=tuple(tools))


NO_ARGUMENTS: Final = TemplateArguments()
"""Arguments for the chat template of a prompt without tools and variables."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Task for the policy: a prompt, and the reference data from which rewards are computed."""

    source: str
    """Origin of the problem for messages, such as `train.jsonl:17`."""
    prompt: Prompt
    answer: str
    """Reference answer, or an empty string if the data has no answers."""
    worked: str | None = None
    """Worked solution, which ends in the answer, or None if it is not known."""
    worked_turns: tuple[str, ...] = ()
    """Worked solution of an episode: turns of the policy and replies of the environment, alternately."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded images of the prompt, in order."""
    columns: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    """Columns that an environment receives in addition to the prompt and the answer."""
    template: TemplateArguments = NO_ARGUMENTS
    """Arguments of the chat template, if the prompt is a chat."""
    part: int = 0
    """Index of the part of the source from which the problem comes, if the source has weights
    (`DataSource.weights`)."""

    @property
    def digests(self) -> tuple[str, ...]:
        """BLAKE3 digests of the prompt's images, in order."""
        return tuple(map(digest_of, self.images))

    images_column: str = ""
    """Name of the column from which the images were read, for messages. Empty if there is none."""
    identity_version: int = 1
    """Version of the rules for reading files (`ProblemFile.version`), on which `identity` and `split_key` depend."""

    def find_image(self, number: int) -> str:
        """Return the origin of the image with index `number` for messages, such as `train.jsonl:17: image 1`."""
        column = f"{self.images_column}: " if self.images_column else ""
        return f"{self.source}: {column}image {number + 1}"

    @property
    def identity(self) -> str:
        """Text that identifies the problem in hashes and comparisons: its prompt, images, columns and tools."""
        tools, version = self.template.tools, self.identity_version
        return identity(self.prompt, self.digests, self.columns, tools=tools, version=version)

    @property
    def split_key(self) -> str:
        """Text whose hash assigns the problem to a split. Problems that are nearly equal have the same text."""
        tools, version = self.template.tools, self.identity_version
        return split_key(self.prompt, self.digests, self.columns, tools=tools, version=version)


def encode_template_input(prompt: Prompt, arguments: TemplateArguments) -> str:
    """Return a chat and its template arguments as JSON. Empty if role, text and name of the messages are all there
    is."""
    if isinstance(prompt, str):
        return ""
    if not any(each.fields or each.content is None for each in prompt) and arguments == NO_ARGUMENTS:
        return ""
    document = {
        "messages": [each.encode() for each in prompt],
        "tools": [dict(tool) for tool in arguments.tools],
        "kwargs": {**arguments.kwargs},
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False)  # templates show keys in the order of the file


def decode_template_input(encoded: str) -> tuple[tuple[Message, ...], TemplateArguments]:
    """Return the messages and arguments that `encode_template_input` encoded. For an empty text, return no messages."""
    if not encoded:
        return (), NO_ARGUMENTS
    document = json.loads(encoded)
    arguments = TemplateArguments(tools=tuple(document["tools"]), kwargs=document["kwargs"])
    return tuple(map(_decode_message, document["messages"])), arguments


def _decode_message(turn: dict[str, Any]) -> Message:
    """Return the message that `Message.encode` encoded."""
    content = turn.pop("content", None)
    if isinstance(content, list):
        content = tuple(part["text"] if part["type"] == "text" else ImagePlace() for part in content)
    return Message(turn.pop("role"), content, turn.pop("name", ""), turn)


class ProblemSource(Protocol):
    """Function that generates or reads the problems of a data source, called by `load_problems`.

    The same arguments give the same problems in the same order, and no problem is in both splits.
    """

    def __call__(self, data: Any, split: str, seed: int, /) -> Iterable[Problem]:  # noqa: ANN401 -- own settings class
        """Generate or read the problems of a split, `train` or `heldout`."""
        ...


class ExclusionFilter(Protocol):
    """Function that finds the training problems that a data source excludes, such as near-duplicates."""

    def __call__(self, data: Any, seed: int, /) -> dict[str, str]:  # noqa: ANN401 -- own settings class
        """Return the reason for each excluded problem, keyed by the problem's origin (`Problem.source`)."""
        ...


def find_exclusions(data: DataConfig, seed: int) -> dict[str, str]:
    """Return the training problems that a data source excludes: the reason for each, keyed by the problem's origin."""
    if not data.exclusion_filter:
        return {}
    return cast(ExclusionFilter, find_target(data.exclusion_filter, where=f"data {data.label!r}"))(data, seed)


def is_heldout(text: str, share: float) -> bool:
    """Return whether a text belongs to the held-out split. `share` is the expected share of held-out texts.

    The result depends only on the text and the share, so a problem never changes its split.
    """
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big") < share * 2**64


def identity(
    prompt: Prompt,
    images: Sequence[str] = (),
    columns: Mapping[str, JsonValue] = {},
    *,
    tools: Sequence[Mapping[str, JsonValue]] = (),
    version: int = 1,
) -> str:
    """Return the text that identifies a problem in hashes and comparisons. `images` are the digests of its images.

    `columns` are the additional values that an environment receives, and `tools` the schemas that a chat shows. In
    version 2 the text does not depend on the format of the file, on Unicode normalization or on outer white space.
    """
    return _identify(prompt, images, columns, tools, convert=None if version == 1 else canonicalize_text)


def split_key(
    prompt: Prompt,
    images: Sequence[str] = (),
    columns: Mapping[str, JsonValue] = {},
    *,
    tools: Sequence[Mapping[str, JsonValue]] = (),
    version: int = 1,
) -> str:
    """Return the text whose hash assigns a problem to a split. The arguments are those of `identity`.

    In version 1 this is the identity. In version 2, prompts that differ only in letter case, white space or Unicode
    normalization have the same key, so such near twins are never in different splits.
    """
    return _identify(prompt, images, columns, tools, convert=None if version == 1 else fold_text)


def _identify(
    prompt: Prompt,
    images: Sequence[str],
    columns: Mapping[str, JsonValue],
    tools: Sequence[Mapping[str, JsonValue]],
    *,
    convert: Callable[[str], str] | None,
) -> str:
    """Return prompt, images (digests), columns and tools as one text. `convert`, if given, is applied to all texts."""
    if isinstance(prompt, str):
        text = convert(prompt) if convert else prompt
    else:
        turns: JsonValue = [_convert_turn(turn, convert) if convert else turn.values() for turn in prompt]
        text = json.dumps(turns, ensure_ascii=False)
        shown = [convert(encode_columns(drop_absent(tool))) if convert else encode_columns(tool) for tool in tools]
        text = json.dumps([text, *shown], ensure_ascii=False) if shown else text
    if convert:
        columns = {name: map_texts(value, convert) for name, value in canonicalize_columns(columns).items()}
    if columns:
        return json.dumps([text, list(images), encode_columns(columns)], ensure_ascii=False)
    return json.dumps([text, list(images)], ensure_ascii=False) if images else text


def _convert_turn(turn: Message, convert: Callable[[str], str]) -> JsonValue:
    """Return the values that identify a message, without null fields and with `convert` applied to every text."""
    fields = map_texts(drop_absent(turn.fields), convert)
    return map_texts(replace(turn, fields=cast(dict[str, JsonValue], fields)).values(), convert)


def encode_columns(columns: Mapping[str, JsonValue]) -> str:
    """Encode columns as JSON with sorted keys, so that equal columns have equal texts."""
    return json.dumps(columns, ensure_ascii=False, sort_keys=True, allow_nan=False)


def check_columns(columns: Mapping[str, JsonValue], *, source: str) -> None:
    """Raise BadInput, which names the row as `source`, if the value of a column cannot be represented in JSON."""
    for name, value in columns.items():
        try:
            encode_columns({name: value}).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise BadInput(
                f"{source}: {name}: an environment receives this column as JSON, which cannot encode {value!r:.60}"
            ) from error


def check_places(prompt: Prompt, images: int, *, source: str) -> None:
    """Raise BadInput if a chat has image placeholders, but their number differs from the number of images."""
    places = count_image_places(prompt)
    if places and places != images:
        raise BadInput(f"{source}: the number of image placeholders is {places}, but the number of images is {images}")


def count_image_places(prompt: Prompt) -> int:
    """Return the number of image placeholders in a prompt: 0 if the prompt does not say where its images belong."""
    if isinstance(prompt, str):
        return 0
    return sum(isinstance(part, ImagePlace) for turn in prompt for part in turn.parts)


def add_image_places(prompt: tuple[Message, ...], images: int) -> tuple[Message, ...]:
    """Return a chat in which placeholders for the other images are added before the text of the first user message.

    The content of every returned message is a tuple of parts, or None.
    """
    missing = images - count_image_places(prompt)
    turns: list[Message] = []
    for turn in prompt:
        parts = turn.parts
        if missing and (turn.role == "user" or turn is prompt[-1]):
            parts, missing = (*[ImagePlace()] * missing, *parts), 0
        turns.append(replace(turn, content=None if turn.content is None and not parts else parts))
    return tuple(turns)


def fill_prompt(prompt: Prompt, template: str) -> Prompt:
    """Return a template in which `{prompt}` is replaced by a plain-text prompt.

    Chats are returned unchanged, because the tokenizer's chat template renders them.
    """
    return template.replace("{prompt}", prompt) if isinstance(prompt, str) else prompt


def add_system_message(prompt: Prompt, text: str) -> Prompt:
    """Return the chat with a system message added, unless it has one. Plain text becomes the user's message of a
    chat."""
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return chat if chat[0].role == "system" else (Message("system", text), *chat)


def load_problems(data: DataConfig, split: str, seed: int) -> list[Problem]:
    """Return the problems of the split `train` or `heldout` in a fixed order. No prompt is in both splits.

    Raises BadInput if the source fails or returns something other than `Problem` objects.
    """
    assert split in ("train", "heldout"), split
    where = f"data.kind {data.label!r}: {split} problems"
    try:
        problems = [*cast(ProblemSource, implementation_of(data))(data, split, seed)]
    except BadInput:
        raise
    except Exception as error:  # an exception of a user's source means that there is no data to train on
        raise BadInput(f"{where}: the data source raised {type(error).__name__}: {error}") from error
    for problem in problems:
        if not isinstance(problem, Problem):
            raise BadInput(
                f"{where}: expected rheostat.models.data.problems.Problem objects, found {type(problem).__name__}"
            )
        check_columns(problem.columns, source=problem.source)
    return problems if data.image_background == "unconverted" else _convert_images(problems, data)


def _convert_images(problems: Sequence[Problem], data: DataConfig) -> list[Problem]:
    """Return the problems, with images converted to RGB if a policy would lose their shades or transparency.

    Raises one BadInput that lists all images that cannot be decoded.
    """
    converted, input_errors, rounds = list[Problem](), InputErrors(), data.image_version > 1
    for problem in problems:
        images: list[bytes] = []
        for number, image in enumerate(problem.images):
            with input_errors.collect(where := problem.find_image(number)):
                images.append(convert_image(image, data.image_background, where=where, rounds_color=rounds))
        converted.append(replace(problem, images=tuple(images)) if images else problem)
    input_errors.check()
    return converted
