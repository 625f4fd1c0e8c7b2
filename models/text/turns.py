"""Tokens between two turns of the policy: observations encoded in the format of the chat template, or as plain text.
Torch-free.

A turn keeps exactly the tokens that were sampled. The tokens after it depend only on the observation and the template:
they are the tokens that the template writes after a synthetic turn that calls the same tool. Observations cannot inject
control tokens: a separator is inserted after the first character of each control token in their text before the chat is
rendered, and the pieces between separators are encoded separately.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from os.path import commonprefix
from typing import Final

from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.models.data.problems import Content, Message, TemplateArguments
from rheostat.models.text.calls import call_id, encode_call
from rheostat.models.text.chats import TemplateFailed, join_templates, render_chats
from rheostat.models.text.control_tokens import break_tokens, control_token_pattern, separator_for
from rheostat.models.text.tokenizer import ToolSchema, renders_plain_text

Chat = list[dict[str, object]]
"""Messages of a chat in the format of chat templates."""

TURN: Final = "turn4k7q"
REPLY: Final = "reply9x2v"
"""Word that no chat template writes by itself. It marks the environment's reply in trial chats, which are rendered to
examine a template."""
QUESTION: Final = Message("user", "Hello.")
_THOUGHTS: Final = "<think>\nthought\n</think>\n\n"
_LEFT_OUT: Final = "\n[...]\n"
CHARACTERS_PER_TOKEN: Final = 64
"""Assumed maximum number of characters per token. A text with more characters than this times the token limit is
shortened without encoding it first."""
_WAY_OUT: Final = "Set rollout.environment.history = 'per_turn', with which each turn has a separate prompt."
_TOOL_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class TurnFormat:
    """Format of the tokens between two turns of the policy in an episode, for one tokenizer and the tools that its
    prompts describe."""

    tokenizer: PreTrainedTokenizerFast
    ends: tuple[int, ...]
    """IDs of the tokens that end a turn of the policy, such as `<|im_end|>`, in ascending order."""
    tools: tuple[ToolSchema, ...]
    """JSON schemas of the tools that the prompts describe to the policy."""
    is_chat: bool
    """Whether prompts are chats. If they are plain text, the environment's replies are encoded as plain text too."""
    in_parts: bool
    """Whether the chat template requires the content of a message as a list of parts."""
    control: re.Pattern[str] = field(repr=False)
    """Pattern that matches control tokens: special tokens, and added tokens that the chat template writes."""
    kwargs: Mapping[str, JsonValue] = field(default_factory=dict)
    """Variables that are passed to the chat template, by name."""

    def with_arguments(self, arguments: TemplateArguments) -> "TurnFormat":
        """Return the format for a prompt with the given template arguments. If they contain tools, these replace the
        tools of the format."""
        if not arguments.tools and not arguments.kwargs:
            return self
        return replace(self, tools=arguments.tools or self.tools, kwargs=arguments.kwargs)

    @property
    def arguments(self) -> TemplateArguments:
        """Tools and template variables of this format, as arguments of the chat template."""
        return TemplateArguments(self.tools, self.kwargs)

    def encode_observation(self, messages: Sequence[Message], *, ended: bool = True) -> tuple[int, ...]:
        """Return the tokens between two turns: the environment's reply (observation) in the format of the chat
        template. `ended` is whether the last token of the turn is one of `ends`. Raises BadInput if the template does
        not support such messages, and ValueError if it rejects these messages.

        Messages have the role `tool`, with the name of the tool, or `user`. If the last token is not an end token,
        because a stop text ended the turn, the end token of the template is inserted first. For plain text, only the
        texts of the messages are encoded.
        """
        texts = [text_of(message.content) for message in messages]
        if not self.is_chat:
            return self._encode_text("".join(texts))
        separator = separator_for("".join(texts))
        broken = [self.break_control_tokens(text, separator) for text in texts]
        text, end = _render_answer(
            self, [Message(each.role, text, each.name) for each, text in zip(messages, broken, strict=True)]
        )
        tokens = self.encode_pieces(text.split(separator), behind=end)
        return tokens if ended or not end else (_token_id(self.tokenizer, end), *tokens)

    def shorten(self, text: str, max_tokens: int) -> str:
        """Return a text of at most `max_tokens` tokens. If the text is longer, its middle is replaced by a marker of at
        most seven tokens."""
        longest = max_tokens * CHARACTERS_PER_TOKEN
        if len(text) <= longest and self.count_tokens(text) <= max_tokens:
            return text
        low, high = 0, min(len(text) - 1, longest)
        while low < high:
            num_kept = (low + high + 1) // 2
            low, high = (
                (num_kept, high)
                if self.count_tokens(_drop_middle(text, num_kept)) <= max_tokens
                else (low, num_kept - 1)
            )
        return _drop_middle(text, low)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without the tokens that a chat template adds."""
        return len(self._encode_text(text))

    def render(self, chats: Sequence[Chat], *, generation_prompt: bool) -> list[str]:
        """Render chats by the chat template with the tools and variables of this format. Raises TemplateFailed if a
        chat cannot be rendered."""
        return render_chats(
            chats, self.tokenizer, generation_prompt=generation_prompt, tools=self.tools, kwargs=self.kwargs
        )

    def encode_message(self, message: Message) -> dict[str, object]:
        """Return a message as a dict for the chat template. Its content is a text or a list of parts, as the template
        requires."""
        if message.content is None:
            return message.encode()
        text = text_of(message.content)
        return replace(message, content=(text,) if self.in_parts else text).encode()

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Encode a text as tokens. Control tokens that occur in the text are encoded as ordinary text."""
        separator = separator_for(text)
        return self.encode_pieces(self.break_control_tokens(text, separator).split(separator))

    def break_control_tokens(self, text: str, separator: str) -> str:
        """Insert a separator after the first character of every control token in a text, including nested ones, so that
        they become ordinary text."""
        return break_tokens(self.control, text, separator)

    def encode_pieces(self, pieces: Sequence[str], *, behind: str = "") -> tuple[int, ...]:
        """Encode each piece of text separately and return all tokens. Each piece is encoded as if it followed the token
        `behind`, by default EOS."""
        anchor = behind or str(self.tokenizer.eos_token)
        token_ids: list[int] = []
        for piece in pieces:
            first, *tokens = self.tokenizer(anchor + piece, add_special_tokens=False)["input_ids"]
            assert first == _token_id(self.tokenizer, anchor), f"expected {anchor!r} to be a single token"
            token_ids += tokens
        return tuple(token_ids)


def turn_format(
    tokenizer: PreTrainedTokenizerFast,
    *,
    stated: Collection[int] = (),
    tools: Sequence[ToolSchema] = (),
    is_chat: bool = True,
) -> TurnFormat:
    """Return the format of a policy's turns, determined from its tokenizer and chat template. `stated` are the tokens
    that end a completion according to the generation config. Raises BadInput if prompts are chats but the tokenizer has
    no chat template or the template fails.

    If the template ends the last turn of a chat neither with one of these tokens nor with EOS, the control token that
    it writes there also ends turns, like Gemma's `<end_of_turn>`.
    """
    if is_chat and not tokenizer.chat_template:
        raise BadInput("the policy's tokenizer has no chat template, but the messages of an environment need one")
    template = join_templates(tokenizer) if is_chat else ""
    form = TurnFormat(
        tokenizer,
        ends=tuple(sorted({*stated, tokenizer.eos_token_id})),
        tools=tuple(tools),
        is_chat=is_chat,
        in_parts=is_chat and not renders_plain_text(tokenizer),
        control=control_token_pattern(tokenizer, template=template),
    )
    if not is_chat:
        return form
    return replace(form, ends=tuple(sorted({*form.ends, *_find_own_end(form)})))


def _find_own_end(form: TurnFormat) -> list[int]:
    """Return the ID of the control token with which the template ends the last turn of a chat, in a list. The list is
    empty if this is one of the known end tokens."""
    closing = _render_closing(form)
    own = form.control.search(closing)
    return [] if own is None or _find_first_end(form, closing) else [_token_id(form.tokenizer, own[0])]


def find_end_of_last_turn(form: TurnFormat) -> tuple[str, str] | None:
    """Return the text that the template writes after the content of the last turn of a chat, and the token that ends
    the turn.

    Returns None if the template writes no end token there. Raises BadInput if the template rejects a short chat.
    """
    closing = _render_closing(form)
    end = _find_first_end(form, closing)
    return None if end is None else (closing[: end.start()], end[0])


def _render_closing(form: TurnFormat) -> str:
    """Return the text that the chat template writes after the content of the last turn of a chat. Raises BadInput if
    the template rejects the chat."""
    chat = [form.encode_message(QUESTION), form.encode_message(Message("assistant", TURN))]
    try:
        [text] = form.render([chat], generation_prompt=False)
    except TemplateFailed as error:
        raise BadInput(f"the policy's chat template {first_error_line(error)}") from error
    return text[text.rfind(TURN) + len(TURN) :]


def check_template_appends(form: TurnFormat, *, role: str, where: str) -> None:
    """Check that the chat template does not change earlier messages when turns and messages of the role `role` follow.
    Raises BadInput, whose message starts with `where`, if the check fails.

    Otherwise the policy would read other tokens in later turns than those that were sampled. The test turns contain
    thoughts, because some templates remove these from earlier turns. The text after a turn must not depend on the
    number of turns either.
    """
    if not form.is_chat:
        return
    steps = _render_growing_chat(form, Message(role, REPLY, "find" if role == "tool" else ""))
    for at, (before, after) in enumerate(pairwise(steps), start=1):
        if not after.text.startswith(before.kept):
            raise BadInput(
                f"{where}: the policy's chat template renders {_describe_change(steps[:at], after)} differently once a "
                f"message with role {after.role!r} follows, so the policy would not see the tokens that it sampled. "
                f"{_WAY_OUT}"
            )
    if len({after.text.removeprefix(turn.kept) for turn, after in pairwise(steps) if after.role == role}) > 1:
        raise BadInput(
            f"{where}: the policy's chat template renders a message with role {role!r} differently after a later "
            f"turn, so the tokens of the message would change during the episode. {_WAY_OUT}"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """Trial chat rendered up to one of its messages. It is compared with the same chat after more messages."""

    role: str
    alone: str
    """Rendered chat without the prompt for the next turn and without the text after the end of a turn."""
    kept: str
    """Part of the rendered chat that must not change when messages follow: everything except the text after the end of
    a turn."""
    text: str
    """Full text of the trial chat up to this message."""


def _render_growing_chat(form: TurnFormat, answer: Message) -> list[_Step]:
    """Render a trial chat of three turns, each followed by the reply `answer`, after every message, and return all
    renderings."""
    turn, probe = _find_synthetic_turn(form, [answer])
    _find_end_of_turn(form, turn, probe)
    turn |= form.encode_message(Message("assistant", _THOUGHTS if "tool_calls" in turn else _THOUGHTS + TURN))
    question, _, reply = _build_chat(form, turn, [answer])
    chat = [question, *[turn, reply] * 3]
    so_far = [chat[:length] for length in range(1, len(chat) + 1)]
    try:
        texts = form.render(so_far, generation_prompt=False)
        prompts = form.render(so_far, generation_prompt=True)
    except TemplateFailed as error:
        raise BadInput(f"the policy's chat template {first_error_line(error)}") from error
    steps = []
    for message, text, prompt in zip(chat, texts, prompts, strict=True):
        prefix = text[: _find_end_of_turn(form, turn, text)[0]] if message is turn else prompt
        alone, whole = (prefix, text) if message is turn else (text, prompt)
        steps.append(_Step(str(message["role"]), alone, prefix, whole))
    return steps


def _describe_change(steps: Sequence[_Step], after: _Step) -> str:
    """Return a description, for an error message, of the earlier message that the template changed between `steps` and
    `after`, the rendering with more messages."""
    same = len(commonprefix([steps[-1].kept, after.text]))  # noqa: RUF071 -- compares texts
    roles = [step.role for step in steps if len(step.alone) > same]
    return f"an earlier message with role {roles[0]!r}" if roles else "the beginning of a turn"


# ---- synthetic chats
def _render_answer(form: TurnFormat, messages: Sequence[Message]) -> tuple[str, str]:
    """Return the text that the chat template writes after a turn for the given reply messages, and the token that ends
    the turn (empty if there is none). Raises ValueError if the template rejects the messages."""
    turn, probe = _find_synthetic_turn(form, messages)
    cut, end = _find_end_of_turn(form, turn, probe)
    try:
        [text] = form.render([_build_chat(form, turn, messages)], generation_prompt=True)
    except TemplateFailed as error:
        raise ValueError(f"the policy's chat template {first_error_line(error)}") from error
    if not text.startswith(probe[:cut]):
        raise ValueError("the policy's chat template renders a turn differently if this observation follows")
    return text[cut:], end


def _find_synthetic_turn(form: TurnFormat, messages: Sequence[Message]) -> tuple[dict[str, object], str]:
    """Find an invented turn of the assistant to which the chat template accepts replies with the roles of `messages`.
    Returns the turn, and the rendered chat, in which placeholder words replace the texts of the turn and the replies.
    Raises BadInput if the template accepts no such turn."""
    probes = [Message(message.role, REPLY, message.name) for message in messages]
    reason = ""
    for turn in _candidate_turns(form, messages):
        try:
            [probe] = form.render([_build_chat(form, turn, probes)], generation_prompt=True)
        except TemplateFailed as error:
            reason = first_error_line(error)
            continue
        if TURN in probe and probe.count(REPLY) >= len(probes):
            return turn, probe
        reason = "does not render them"
    roles = ", ".join(dict.fromkeys(message.role for message in messages))
    raise BadInput(f"the policy's chat template does not support messages with role {roles} after a turn: it {reason}")


def _candidate_turns(form: TurnFormat, messages: Sequence[Message]) -> Iterator[dict[str, object]]:
    """Yield invented turns of the assistant to which `messages` could be replies: first a turn with tool calls, if a
    message is a tool's result, then a turn with plain text."""
    names = [_tool_name(message) for message in messages if message.role == "tool"]
    if names:
        calls = [encode_call(name, {"of": TURN}, number=number) for number, name in enumerate(names)]
        yield {**form.encode_message(Message("assistant", "")), "tool_calls": calls}
    yield form.encode_message(Message("assistant", TURN))


def _build_chat(form: TurnFormat, turn: dict[str, object], messages: Sequence[Message]) -> Chat:
    """Return a trial chat: a question, the turn, and the messages that reply to the turn."""
    return [form.encode_message(QUESTION), turn, *encode_answers(form, messages)]


def encode_answers(form: TurnFormat, messages: Sequence[Message]) -> Chat:
    """Return the replies to a turn in the format of chat templates. Messages with the role `tool` get the IDs of the
    turn's tool calls, in order."""
    chat, numbers = Chat(), count()
    for message in messages:
        if message.role == "tool":
            named = form.encode_message(replace(message, name=_tool_name(message)))
            chat.append({**named, "tool_call_id": call_id(next(numbers))})
        else:
            chat.append(form.encode_message(message))
    return chat


def _find_end_of_turn(form: TurnFormat, turn: dict[str, object], text: str) -> tuple[int, str]:
    """Return the index after the end of the invented turn in the rendered chat `text`, and the token that ends the turn
    (empty if there is none). Raises BadInput if no end token follows a turn with a tool call.

    The token is the first end token after the turn. If the template ends its last turn differently from earlier turns,
    as GPT-OSS does, it is the first control token.
    """
    begin = text.rfind(TURN) + len(TURN)
    closing, answered, _ = text[begin:].partition(REPLY)
    end = _find_first_end(form, closing)
    if end is None and "tool_calls" in turn and answered:
        raise BadInput(
            f"after a tool call, the policy's chat template writes none of the tokens that end a turn ({form.ends}), "
            "so a turn with a call would not end. Add the token that the template writes there to eos_token_id in "
            "generation_config.json."
        )
    if end is None and answered:
        [last] = form.render([[form.encode_message(QUESTION), turn]], generation_prompt=False)
        if form.control.search(last, last.rfind(TURN)):
            end = form.control.search(closing)
    return (begin + end.end(), end[0]) if end else (begin, "")


def _find_first_end(form: TurnFormat, text: str) -> re.Match[str] | None:
    """Return the match of the first end token of the format in a text, or None if there is none."""
    end_texts = [str(token) for token in form.tokenizer.convert_ids_to_tokens(form.ends) if token]
    return re.search("|".join(map(re.escape, sorted(end_texts, key=len, reverse=True))), text)


# ---- texts
def text_of(content: Content) -> str:
    """Return the text of a message's content. Raises ValueError if the content contains an image."""
    parts = (content,) if isinstance(content, str) else content or ()
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("an observation of an environment must be text, but it contains an image")
    return "".join(map(str, parts))


def _tool_name(message: Message) -> str:
    """Return the name of the tool that a message comes from, or "unknown" if the name could contain a control token,
    because policies can invent names."""
    return message.name if _TOOL_NAME.fullmatch(message.name) else "unknown"


def _drop_middle(text: str, num_kept: int) -> str:
    """Return a text without its middle: `num_kept` characters in total from its start and its end, with a marker
    between them."""
    return text[: (num_kept + 1) // 2] + _LEFT_OUT + text[len(text) - num_kept // 2 :]


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the ID of a token, given its text."""
    return int(tokenizer.convert_tokens_to_ids(token))


def first_error_line(error: TemplateFailed) -> str:
    """Return the first line of the message of a chat template's error."""
    return next(iter(str(error).splitlines()))
