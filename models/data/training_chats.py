"""Whole chats for supervised training, read from the rows of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from infra.errors import BadInput, InputErrors
from models.config.training import ChatTraining
from models.data.images import convert_image, read_images
from models.data.messages import omit_nulls, read_arguments, read_messages
from models.data.problems import (
    NO_ARGUMENTS,
    Message,
    TemplateArguments,
    check_places,
    identity,
    is_heldout,
    split_key,
)
from models.data.rows import find_data_files, read_rows


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

    @property
    def turns(self) -> list[int]:
        """Indices of the assistant's messages in `messages`."""
        return [index for index, message in enumerate(self.messages) if message.role == "assistant"]

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Messages before the first turn of the assistant."""
        return self.messages[: self.turns[0]]

    def identity(self, version: int) -> str:
        """Return the text that identifies the prompt when chats are compared. `version` is the version of the rules for
        reading files."""
        return identity(self.prompt, tools=self.template.tools, version=version)

    def split_key(self, version: int) -> str:
        """Return the text whose hash decides whether the chat is held out. It depends only on the prompt, so chats with
        the same prompt are in the same split. `version` is the version of the rules for reading files."""
        return split_key(self.prompt, tools=self.template.tools, version=version)


def load_chats(
    config: ChatTraining, *, background: str = "unconverted"
) -> tuple[list[TrainingChat], list[TrainingChat]]:
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


def _read_chats(path: Path, config: ChatTraining, *, background: str) -> list[TrainingChat]:
    """Read all chats of a file. Raises one BadInput that lists all invalid rows."""
    columns = [config.messages_column, *filter(None, [config.images_column]), *config.required_chat_columns]
    chats, input_errors, found = list[TrainingChat](), InputErrors(), find_data_files(path)
    optional = config.optional_chat_columns
    root = config.images_root or (path if found.is_folder else path.parent)
    for place, row in read_rows(path, columns, input_errors, optional=optional, version=config.version):
        with input_errors.collect(place):
            chats.append(_build_chat(place, row, config, is_table=found.is_table, root=root, background=background))
    input_errors.check()
    if not chats:
        raise BadInput(f"{path}: the file is empty. Expected at least one chat.")
    return chats


def _build_chat(
    place: str, row: Mapping[str, object], config: ChatTraining, *, is_table: bool, root: Path, background: str
) -> TrainingChat:
    """Return the chat in a row. `place` names the row in messages. Raises BadInput if a value is invalid."""
    column = config.messages_column
    read = [column, *config.argument_columns]
    values = {name: omit_nulls(row.get(name)) for name in read} if is_table else row
    value = values[column]
    if not isinstance(value, list):
        raise BadInput(
            f"{place}: {column}: expected a chat as a list of messages, found {value!r:.60}. Set "
            "warmup.chats.messages_column to the column with the messages."
        )
    messages = read_messages(place, value, column, fields=config.message_fields)
    if not any(message.role == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message.role for message in messages)) or "no message"
        raise BadInput(f"{place}: {column}: the chat has no turn of the assistant to train on, found roles: {roles}.")
    images: Sequence[bytes] = ()
    if config.images_column is not None:
        images = read_images(row, config.images_column, place=place, root=root)
        if background != "unconverted":
            where = f"{place}: {config.images_column}: image"
            images = [convert_image(each, background, where=f"{where} {n}") for n, each in enumerate(images, start=1)]
    check_places(messages, len(images), source=place)
    return TrainingChat(place, messages, tuple(images), read_arguments(place, values, config))


def _require_new_prompts(train: Sequence[TrainingChat], heldout: Sequence[TrainingChat], config: ChatTraining) -> None:
    """Raise BadInput if a held-out chat has the same prompt as a training chat."""
    prompts, input_errors = {chat.identity(config.version) for chat in train}, InputErrors()
    for chat in heldout:
        with input_errors.collect(chat.source):
            if chat.identity(config.version) in prompts:
                raise BadInput(f"{chat.source}: this held-out chat begins like a training chat. Remove one of the two.")
    input_errors.check()
