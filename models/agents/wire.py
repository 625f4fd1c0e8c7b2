"""Requests of OpenAI-compatible clients: their fields, the checks of these fields, and the errors that clients read.

Fields that would change the distribution from which the policy samples are refused, because the recorded log-probs must
belong to the distribution that is trained. Temperature, top_p, top_k and seed of a request have no effect. Hints about
tools (`tool_choice`, `parallel_tool_calls`) have no effect either, and unknown fields are ignored.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from rheostat.models.agents.matching import THOUGHTS, ChatInput
from rheostat.models.data.messages import read_kwargs, read_tools
from rheostat.models.data.problems import Message, TemplateArguments

NEUTRAL: Final[Mapping[str, tuple[JsonValue, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "functions": ([],),
    "suffix": ("",),
    "prompt_logprobs": (0,),
    "top_logprobs": (0,),
    "continue_final_message": (False,),
    "features": (),
}
"""Fields of a request that are not supported, each with the values that have no effect. Null has no effect in any
field."""
_UNION_MEMBER: Final = re.compile(r"str$|int$|.*\[")
"""Pattern of the parts of a pydantic error location that name a member of a union, such as `str`. Messages omit these
parts."""
MAX_MESSAGES: Final = 10_000
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
"""Maximum number of stop texts of a request, and maximum length of a stop text in characters. After each new token, the
engine decodes as many tokens again as the longest stop text may have."""

MAX_TOP: Final = 20
"""Maximum number of most probable tokens that an answer may contain for each position."""

_T = TypeVar("_T")
_List = Annotated[list[_T], Field(fail_fast=True)]
"""List whose first wrong element ends the check. Otherwise the errors of a large body would fill the memory."""
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


class RefusedRequest(Exception):
    """Raised when a request of a program cannot be answered. The program receives the message."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer."""
        self.code = code
        """Short name of the error, which programs compare, or None."""
        self.param = param
        """Name of the field that is wrong, or None."""

    def body(self) -> dict[str, JsonValue]:
        """Return the body of the answer, in the format of OpenAI."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = " ".join(str(self).split())
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class _Wire(BaseModel):
    """Object in the body of a request. Fields that are not listed are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class WireFunction(_Wire):
    """Function that a tool call names, with its arguments as JSON text."""

    name: Annotated[str, Field(max_length=256)]
    arguments: str = "{}"


class WireToolCall(_Wire):
    """Tool call in a message of the assistant."""

    id: Annotated[str, Field(max_length=256)] = ""
    function: WireFunction


class WirePart(_Wire):
    """Part of the content of a message. Only texts are supported."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class WireMessage(_Wire):
    """Message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _List[WirePart] | None = None
    name: str | None = None
    tool_calls: _List[WireToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def to_message(self) -> Message:
        """Return the message in the form in which chats are rendered."""
        parts = self.content if isinstance(self.content, list) else [WirePart(type="text", text=self.content or "")]
        calls: list[JsonValue] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in self.tool_calls or []
        ]
        others: dict[str, JsonValue] = {
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            THOUGHTS: self.reasoning_content,
        }
        fields = {name: value for name, value in others.items() if value}
        return Message(self.role, "".join(part.text for part in parts), self.name or "", fields)


class _Answered(_Wire):
    """Fields common to requests for chats and texts, and to the sampling parameters of requests for tokens."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[_List[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer, without empty strings."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(filter(None, texts))


class StreamOptions(_Wire):
    """Options of an answer that is sent as an event stream."""

    include_usage: bool | None = None


class ChatRequest(_Answered):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[_List[WireMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[JsonValue] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    logprobs: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of the answer that the request states, or None."""
        return self.max_completion_tokens or self.max_tokens

    def chat(self) -> ChatInput:
        """Return the chat with its tools and template variables. Raises BadInput if a tool is not the schema of a
        function, or if a variable is one that Rheostat always sets."""
        arguments = TemplateArguments(
            read_tools("request", self.tools, "tools"),
            read_kwargs("request", self.chat_template_kwargs, "chat_template_kwargs"),
        )
        return ChatInput(tuple(message.to_message() for message in self.messages), arguments)


class TextRequest(_Answered):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[_List[TokenId], Field(min_length=1)]
        | Annotated[_List[str] | _List[_List[TokenId]], Field(min_length=1, max_length=1024)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Prompts of the request, each as a text or as token IDs."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[str | Sequence[int]]", [self.prompt] if is_one else self.prompt)


class TokenSampling(_Answered):
    """Field `sampling_params` of a request for tokens."""

    stop_token_ids: _List[int] | None = None


class TokenRequest(_Wire):
    """Body of `POST /inference/v1/generate`, as vLLM defines it."""

    token_ids: Annotated[_List[TokenId], Field(min_length=1)]
    sampling_params: TokenSampling = TokenSampling()
    stream: Literal[False] | None = None


_R = TypeVar("_R", ChatRequest, TextRequest, TokenRequest)


def read_request(body: bytes, kind: type[_R]) -> _R:
    """Parse the body of a request. Raises RefusedRequest, which names the first wrong field, if it is invalid or has a
    field that is not supported."""
    try:
        value = from_json(body, allow_inf_nan=False)
        fields = value if isinstance(value, dict) else {}
        sampling = fields.get("sampling_params")
        _check_neutral(fields | (sampling if isinstance(sampling, dict) else {}))
        return kind.model_validate(value)
    except ValidationError as error:
        # The members of a union report one error each. The most specific error has the longest location.
        deepest = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
        where = ".".join(str(part) for part in deepest["loc"] if not _UNION_MEMBER.match(str(part))) or "body"
        raise RefusedRequest(f"{where:.100}: {deepest['msg']}", param=where[:100]) from None
    except ValueError as error:
        raise RefusedRequest(f"the body of the request must be valid JSON in UTF-8: {error}") from None


def _check_neutral(fields: Mapping[str, JsonValue]) -> None:
    """Raise RefusedRequest if a request sets a field that is not supported to a value that has an effect."""
    for name, values in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise RefusedRequest(
                f"{name}: the value {json.dumps(value):.60} is not supported. Remove the field", param=name
            )
