"""Whole chats for supervised training, read from the rows of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.inputs import format_path
from rheostat.models.config.training import ChatTraining
from rheostat.models.data.columns import find_chat_columns
from rheostat.models.data.dropping import describe_empty_file
from rheostat.models.data.image_files import find_image_root
from rheostat.models.data.images import convert_image, read_images
from rheostat.models.data.messages import (
    add_system_column,
    check_marks,
    omit_nulls,
    read_arguments,
    read_messages,
    read_text,
)
from rheostat.models.data.problems import (
    NO_ARGUMENTS,
    Message,
    TemplateArguments,
    check_places,
    identity,
    is_heldout,
    split_key,
)
from rheostat.models.data.rows import find_data_files, peek_rows, read_rows
from rheostat.models.data.shapes import IMAGE_COLUMNS


@dataclass(frozen=True, slots=True)
class TrainingChat:
    """Chat on which the policy is trained, including the turns of the assistant."""

    source: str
    """Origin of the chat for messages, such as `chats.jsonl:17`."""
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    """Encoded images of the messages, in order."""
    template: TemplateArguments = NO_ARGUMENTS
    """Arguments with which the chat template renders the chat: tools and variables."""
    num_prompt_messages: int | None = None
    """Number of messages in the prompt, if the row has a prompt and a completion. Turns of the assistant in the prompt
    are not trained."""

    @property
    def turns(self) -> list[int]:
        """Indices of the assistant's messages in `messages` that may be trained."""
        start = self.num_prompt_messages or 0
        return [index for index, message in enumerate(self.messages) if index >= start and message.role == "assistant"]

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Messages before the completion, or before the first turn of the assistant if the row has no completion."""
        return self.messages[: self.turns[0] if self.num_prompt_messages is None else self.num_prompt_messages]

    def identity(self, version: int) -> str:
        """Return the text that identifies the prompt when chats are compared. `version` is the version of the rules for
        reading files."""
        return identity(self.prompt, tools=self.template.tools, version=version)

    def split_key(self, version: int) -> str:
        """Return the text whose hash decides whether the chat is held out. It depends only on the prompt, so chats with
        the same prompt are in the same split. `version` is the version of the rules for reading files."""
        return split_key(self.prompt, tools=self.template.tools, version=version)


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Plain-text prompt and its completion, or one plain text, on which the policy is trained without a chat
    template."""

    source: str
    """Origin of the texts for messages, such as `texts.jsonl:17`."""
    prompt: str
    """Text before the completion, or the whole text if the row has one plain text."""
    completion: str | None
    """Text that is trained, or None if the row has one plain text, which is trained as a whole."""
    images: tuple[bytes, ...] = ()
    """Encoded images of the prompt, in order."""

    def identity(self, version: int) -> str:
        """Return the text that identifies the prompt when rows are compared. `version` is the version of the rules for
        reading files."""
        return identity(self.prompt, version=version)

    def split_key(self, version: int) -> str:
        """Return the text whose hash decides whether the row is held out. `version` is the version of the rules for
        reading files."""
        return split_key(self.prompt, version=version)


TrainingRow = TrainingChat | TrainingText
"""Row of a file for supervised training."""


def load_chats(config: ChatTraining, *, background: str = "unconverted") -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Return the training chats and the held-out chats, in file order.

    `background` is the color onto which transparent images are composed (`data.image_background`). Raises BadInput if a
    row is invalid, if a split is empty, or if a held-out chat has the prompt of a training chat.
    """
    chats = _read_chats(config.path, config, background=background)
    if config.heldout_path is not None:
        heldout = _read_chats(config.heldout_path, config, background=background)
        _require_new_prompts(chats, heldout, config)
        return chats, heldout
    in_heldout = [is_heldout(chat.split_key(config.version), config.heldout_fraction) for chat in chats]
    train = [chat for chat, held_out in zip(chats, in_heldout, strict=True) if not held_out]
    heldout = [chat for chat, held_out in zip(chats, in_heldout, strict=True) if held_out]
    if not train or (config.heldout_fraction and not heldout):
        raise BadInput(
            f"{config.path}: warmup.chats.heldout_fraction = {config.heldout_fraction} leaves no "
            f"{'held-out' if train else 'training'} chat of {len(chats)}. Change the fraction, set it to 0 to measure "
            "no loss on held-out chats, or set warmup.chats.heldout_path."
        )
    return train, heldout


def order_chats(num_chats: int, num_examples: int, seed: int) -> list[int]:
    """Return the indices of the chats for all training steps, in training order. Each epoch contains every chat once,
    in another random order."""
    rng, order = Random(f"{seed}/warmup"), list[int]()
    while len(order) < num_examples:
        order += rng.sample(range(num_chats), k=min(num_chats, num_examples - len(order)))
    return order


def report_chats(config: ChatTraining) -> list[str]:
    """Return notes for the plan about the shapes that were recognized in the files of chats, about columns with system
    messages, and about columns of images that are not read."""
    notes = list[str]()
    for path in filter(None, (config.path, config.heldout_path)):
        found, (columns, _), name = find_chat_columns(path, config), peek_rows(path), format_path(path)
        notes += filter(None, [found.note])
        if found.has_chats and config.system_column in columns:
            notes.append(f"{name}: the column {config.system_column!r} contains system messages.")
        unread = [column for column in IMAGE_COLUMNS if column in columns and config.images_column is None]
        if unread:
            notes.append(
                f"{name} has a column {unread[0]!r}, which is not read, so chats have no images. Set "
                f"warmup.chats.images_column = {unread[0]!r} to show the images to the policy."
            )
    return list(dict.fromkeys(notes))


def _read_chats(path: Path, config: ChatTraining, *, background: str) -> list[TrainingRow]:
    """Read all chats of a file. Raises one BadInput that lists all invalid rows."""
    columns, input_errors, found = find_chat_columns(path, config), InputErrors(), find_data_files(path)
    config = columns.file
    names = [config.prompt_column, config.completion_column] if columns.has_completions else [config.messages_column]
    names = [config.text_column] if columns.has_texts else names
    names += [*filter(None, [config.images_column]), *config.required_chat_columns]
    chats, optional = list[TrainingRow](), config.optional_chat_columns
    root = find_image_root(path, config)
    build = _build_completion if columns.has_completions else _build_text if columns.has_texts else _build_chat
    for place, row in read_rows(path, names, input_errors, optional=optional, version=config.version):
        with input_errors.collect(place):
            values = {name: omit_nulls(value) for name, value in row.items()} if found.is_table else row
            chat = build(place, values, config)
            images = _read_images(place, row, config, root=root, background=background)
            prompt = chat.messages if isinstance(chat, TrainingChat) else chat.prompt
            check_places(prompt, len(images), source=place)
            if config.used_image_mark:
                check_marks(values[names[0]], prompt, len(images), config.used_image_mark, source=place)
            chats.append(replace(chat, images=images))
    input_errors.check()
    if not chats:
        raise describe_empty_file(path, "chat")
    return chats


def _read_images(
    place: str, row: Mapping[str, object], config: ChatTraining, *, root: Path, background: str
) -> tuple[bytes, ...]:
    """Return the encoded images of a row. `root` is the directory of image files, and `place` names the row in
    messages. Raises BadInput if an image is invalid."""
    if config.images_column is None:
        return ()
    images: Sequence[bytes] = read_images(row, config.images_column, place=place, root=root)
    if background != "unconverted":
        where = f"{place}: {config.images_column}: image"
        images = [convert_image(each, background, where=f"{where} {n}") for n, each in enumerate(images, start=1)]
    return tuple(images)


def _build_chat(place: str, row: Mapping[str, object], config: ChatTraining) -> TrainingRow:
    """Return the chat in a row, without its images. `place` names the row in messages. Raises BadInput if a value is
    invalid."""
    column = config.messages_column
    value = row[column]
    if not isinstance(value, list):
        raise BadInput(
            f"{place}: {column}: expected a chat as a list of messages, found {value!r:.60}. Set "
            "warmup.chats.messages_column to the column with the messages."
        )
    if config.loss == "completion":
        raise BadInput(
            f"{place}: warmup.chats.loss = 'completion' needs rows with a prompt and a completion, but the row has a "
            f"whole chat in column {column}. Set loss = 'assistant' or 'last'."
        )
    messages = read_messages(place, value, column, fields=config.message_fields, image_mark=config.used_image_mark)
    messages = add_system_column(place, messages, row, config)
    if not any(message.role == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message.role for message in messages)) or "no message"
        raise BadInput(f"{place}: {column}: the chat has no turn of the assistant to train on, found roles: {roles}.")
    return TrainingChat(place, messages, (), read_arguments(place, row, config))


def _build_completion(place: str, row: Mapping[str, object], config: ChatTraining) -> TrainingRow:
    """Return the prompt and the completion in a row, without images. `place` names the row in messages. Raises BadInput
    if a value is invalid."""
    names = (config.prompt_column, config.completion_column)
    prompt, completion = (row[name] for name in names)
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return TrainingText(place, read_text(place, prompt, names[0]), read_text(place, completion, names[1]))
    if not isinstance(prompt, list) or not isinstance(completion, list):
        kinds = ["a list of messages" if isinstance(each, list) else "plain text" for each in (prompt, completion)]
        raise BadInput(
            f"{place}: {names[0]} and {names[1]} must both be plain text, or both be lists of messages, found "
            f"{kinds[0]} and {kinds[1]}. Write both in the same form."
        )
    context, trained = (
        read_messages(place, value, name, fields=config.message_fields, image_mark=config.used_image_mark)
        for value, name in zip((prompt, completion), names, strict=True)
    )
    context = add_system_column(place, context, row, config)
    chat = TrainingChat(
        place, (*context, *trained), (), read_arguments(place, row, config), num_prompt_messages=len(context)
    )
    if not context or not chat.turns:
        roles = ", ".join(dict.fromkeys(message.role for message in trained)) or "no message"
        raise BadInput(
            f"{place}: {names[1]}: the completion has no turn of the assistant to train on, found roles: {roles}."
            if context
            else f"{place}: {names[0]}: the prompt has no messages. Add a message, or remove the row."
        )
    return chat


def _build_text(place: str, row: Mapping[str, object], config: ChatTraining) -> TrainingRow:
    """Return the plain text in a row, without images. `place` names the row in messages. Raises BadInput if the value
    is not text, or if the loss needs turns or a completion."""
    if config.loss not in ("assistant", "all"):
        raise BadInput(
            f"{place}: warmup.chats.loss = {config.loss!r} needs rows with chats or completions, but the row has plain "
            f"text in column {config.text_column}, which is trained as a whole. Set loss = 'all'."
        )
    return TrainingText(place, read_text(place, row[config.text_column], config.text_column), None)


def _require_new_prompts(train: Sequence[TrainingRow], heldout: Sequence[TrainingRow], config: ChatTraining) -> None:
    """Raise BadInput if a held-out chat has the same prompt as a training chat."""
    prompts, input_errors = {chat.identity(config.version) for chat in train}, InputErrors()
    for chat in heldout:
        with input_errors.collect(chat.source):
            if chat.identity(config.version) in prompts:
                raise BadInput(f"{chat.source}: this held-out chat begins like a training chat. Remove one of the two.")
    input_errors.check()
