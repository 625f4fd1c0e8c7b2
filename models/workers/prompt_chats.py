"""Chats of the prompts of an iteration, for workers that score completions. Torch-free."""

from collections.abc import Mapping, Sequence

from infra.store.shards import ShardRef, read_shard
from infra.store.storage import Store
from models.data.problems import Message, TemplateArguments, decode_template_input
from models.records.schemas import TEMPLATE

Chat = tuple[tuple[Message, ...], TemplateArguments]
"""Messages of a prompt (None for plain text), and the arguments of the chat template."""


def read_chats(store: Store, prompts: ShardRef) -> list[Chat]:
    """Return the messages and template arguments of the prompts of a shard, by row."""
    table = read_shard(store, prompts)
    chats = table["messages"].to_pylist()
    inputs = table[TEMPLATE].to_pylist() if TEMPLATE in table.column_names else [""] * len(chats)
    return [_read_chat(chat or (), encoded or "") for chat, encoded in zip(chats, inputs, strict=True)]


def _read_chat(chat: Sequence[Mapping[str, str | None]], encoded: str) -> Chat:
    """Return the messages and template arguments of a prompt."""
    messages, arguments = decode_template_input(encoded)
    plain = tuple(Message(str(each["role"]), each["content"], each["name"] or "") for each in chat)
    return messages or plain, arguments
