"""Configuration of how the chats of a data file are formatted by the chat template. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import JsonValue, field_validator

from rheostat.infra.config import Settings, Since

MessageFields = Literal["keep", "drop"]

TOOLS: Final = "tools"
KWARGS: Final = "chat_template_kwargs"
SYSTEM: Final = "system"
"""Default names of the columns with tools, with chat template variables and with system messages. A file may lack
columns with these names."""
DEFAULT_COLUMNS: Final = (TOOLS, KWARGS, SYSTEM)
RESERVED_KWARGS: Final = (
    *("messages", "conversations", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "return_assistant_tokens_mask"),
)
"""Variables of chat templates that users cannot set, because Rheostat always sets them."""


class ChatColumns(Settings):
    """Keys for the messages of a chat in a data file, and for the tools and variables that its chat template
    receives."""

    message_fields: Annotated[MessageFields, Since("0.2.0", before="drop")] = "keep"
    """Handling of message fields other than `role` and `content`. "keep" passes `name`, `tool_calls`, `tool_call_id`,
    `reasoning_content`, `reasoning`, `thinking` and `tool_plan` to the chat template and refuses files with other
    fields. "drop" ignores all of these fields."""
    tools_column: Annotated[str | None, Since("0.2.0", before=None)] = TOOLS
    """Column with the tools that the chat template describes to the policy: a list of JSON schemas, or JSON text. A
    file may lack the default column. Set "" to read no column."""
    chat_template_kwargs: Annotated[Mapping[str, JsonValue], Since("0.2.0", before={})] = {}
    """Variables passed to the chat template for every row, by name, such as `{enable_thinking = false}`."""
    chat_template_kwargs_column: Annotated[str | None, Since("0.2.0", before=None)] = KWARGS
    """Column with variables that the chat template receives for this row only: an object, or JSON text. They take
    precedence over `chat_template_kwargs`. A file may lack the default column. Set "" to read no column."""
    system_column: Annotated[str | None, Since("0.2.0", before=None)] = SYSTEM
    """Column with the text of the system message of a chat, as in files of ShareGPT chats. A file may lack the default
    column, and the text may be empty. Plain-text prompts do not use this column. Set "" to read no column."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _require_free_names(cls, kwargs: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        if taken := [name for name in RESERVED_KWARGS if name in kwargs]:
            raise ValueError(
                f"{taken[0]!r} must not be set in chat_template_kwargs, because Rheostat always sets this variable of "
                "the chat template. Remove it"
            )
        return kwargs

    @property
    def required_chat_columns(self) -> list[str]:
        """Configured columns with tools, template variables or system messages that every file must have. Columns with
        the default names are not required."""
        return [name for name in self.argument_columns if name not in DEFAULT_COLUMNS]

    @property
    def set_chat_keys(self) -> list[str]:
        """Configuration keys of the columns with tools, template variables or system messages, if they name other
        columns than the default ones."""
        keys = ("tools_column", "chat_template_kwargs_column", "system_column")
        return [key for key in keys if (name := getattr(self, key)) and name not in DEFAULT_COLUMNS]

    @property
    def optional_chat_columns(self) -> list[str]:
        """Columns with tools, template variables or system messages that a file may lack, because they have the default
        names."""
        return [name for name in self.argument_columns if name in DEFAULT_COLUMNS]

    @property
    def argument_columns(self) -> list[str]:
        """Names of the columns that add to the messages of a chat: tools, template variables, and system messages."""
        return [name for name in (self.tools_column, self.chat_template_kwargs_column, self.system_column) if name]


class ChatFile(ChatColumns):
    """Keys for data files whose prompts may be chats. For plain-text prompts only `prompt_column` has an effect."""

    prompt_column: str = "prompt"
    """Column with the prompt: plain text, or a chat as a list of messages with `role` and `content` (OpenAI) or of
    turns with `from` and `value` (ShareGPT). Like every column key, it can name a nested field by a dotted path such as
    `extra.question`."""

    @property
    def chat_columns(self) -> list[str]:
        """Names of the columns that determine a prompt: the prompt column, then the columns that add to the messages of
        a chat."""
        return [self.prompt_column, *self.argument_columns]
