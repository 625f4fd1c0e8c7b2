"""Configuration of the way in which the chats of a data file reach the chat template. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import JsonValue, field_validator

from infra.config import Settings, Since

MessageFields = Literal["keep", "drop"]

TOOLS: Final = "tools"
KWARGS: Final = "chat_template_kwargs"
"""Names of columns that are read if a file has them, unless other names are configured."""
RESERVED_KWARGS: Final = (
    *("messages", "conversations", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "return_assistant_tokens_mask"),
)
"""Variables of chat templates that cannot be configured, because rendering always sets them."""


class ChatFile(Settings):
    """Keys of files whose prompts can be chats. Only `prompt_column` has an effect on plain-text prompts."""

    prompt_column: str = "prompt"
    """Column with the prompt: plain text, or a list of chat messages with `role` and `content`."""
    message_fields: Annotated[MessageFields, Since("0.2.0", before="drop")] = "keep"
    """Handling of fields of messages in addition to `role` and `content`: "keep" passes `name`, `tool_calls`,
    `tool_call_id`, `reasoning_content`, `reasoning`, `thinking` and `tool_plan` to the chat template and refuses other
    fields, "drop" ignores all of them."""
    tools_column: Annotated[str | None, Since("0.2.0", before=None)] = TOOLS
    """Column with the tools that the chat template shows: a list of JSON schemas, or JSON text. Files may lack the
    default column; "" reads none."""
    chat_template_kwargs: Annotated[Mapping[str, JsonValue], Since("0.2.0", before={})] = {}
    """Variables of the chat template by name, such as `{enable_thinking = false}`."""
    chat_template_kwargs_column: Annotated[str | None, Since("0.2.0", before=None)] = KWARGS
    """Column with variables of the chat template for one row: an object, or JSON text. They take precedence over
    `chat_template_kwargs`. Files may lack the default column; "" reads none."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _require_free_names(cls, kwargs: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        if taken := [name for name in RESERVED_KWARGS if name in kwargs]:
            raise ValueError(f"{taken[0]!r} is always set by Rheostat. Remove it")
        return kwargs

    @property
    def required_chat_columns(self) -> list[str]:
        """Configured columns that every file must have."""
        return [name for name in self._columns if name not in (TOOLS, KWARGS)]

    @property
    def optional_chat_columns(self) -> list[str]:
        """Configured columns that files may lack."""
        return [name for name in self._columns if name in (TOOLS, KWARGS)]

    @property
    def chat_columns(self) -> list[str]:
        """All configured columns that determine a prompt."""
        return [self.prompt_column, *self._columns]

    @property
    def _columns(self) -> list[str]:
        return [name for name in (self.tools_column, self.chat_template_kwargs_column) if name]
