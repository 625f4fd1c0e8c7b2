"""Chat messages of an iteration's prompts, read by workers that score completions.

This module does not import torch.
"""

import json
from collections.abc import Mapping, Sequence

from rheostat.infra.errors import BadInput
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.models.data.problems import Message, TemplateArguments, decode_template_input
from rheostat.models.data.rubrics import RUBRIC, Rubric, parse_rubric
from rheostat.models.records.schemas import TEMPLATE

Chat = tuple[tuple[Message, ...], TemplateArguments]
"""Messages of a prompt (an empty tuple for plain text), and the arguments with which the chat template renders the
messages."""


def read_chats(store: Store, prompts: ShardRef) -> list[Chat]:
    """Return the chat messages and the chat template's arguments of each prompt in a shard, in row order."""
    table = read_shard(store, prompts)
    chats = table["messages"].to_pylist()
    inputs = table[TEMPLATE].to_pylist() if TEMPLATE in table.column_names else [""] * len(chats)
    return [_read_chat(chat or (), encoded or "") for chat, encoded in zip(chats, inputs, strict=True)]


def read_rubrics(store: Store, prompts: ShardRef) -> list[Rubric]:
    """Return the rubric (grading criteria) of each prompt in a shard, in row order. Raises BadInput if a prompt has no
    rubric."""
    columns = read_shard(store, prompts)["columns"].to_pylist()
    try:
        return [parse_rubric(json.loads(row).get(RUBRIC)) for row in columns]
    except ValueError as error:
        raise BadInput(f"The prompts of this run have no rubrics: {error}. Set data.rubric_column.") from error


def _read_chat(chat: Sequence[Mapping[str, str | None]], encoded: str) -> Chat:
    """Return the messages and template arguments of a prompt. `encoded` contains the arguments as JSON."""
    messages, arguments = decode_template_input(encoded)
    plain = tuple(Message(str(each["role"]), each["content"], each["name"] or "") for each in chat)
    return messages or plain, arguments
