"""What stands between two turns: observations as tokens, as a chat template or plain text writes them. Torch-free.

A turn stays the very tokens that were sampled; what follows it depends on the observation and the template alone. It is
what the template writes behind the end of a synthetic turn with a call of the tool's name. No content becomes a control
token: where one is spelt in it, a separator comes behind the first character before the chat is rendered, and what lies
between separators is encoded on its own.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from os.path import commonprefix
from typing import Final

from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.data.problems import Content, Message
from models.text.calls import call_id, spelt_call
from models.text.chats import TemplateFailed, render_chats
from models.text.tokenizer import ToolSchema, takes_texts

Chat = list[dict[str, object]]

TURN: Final = "turn4k7q"
REPLY: Final = "reply9x2v"
"""Words that no template writes of itself: where they come out, a turn and what answers it stand."""
QUESTION: Final = Message("user", "Hello.")
_THOUGHTS: Final = "<think>\nthought\n</think>\n\n"
_PRIVATE_USE: Final = range(0xE000, 0xF900)
_LEFT_OUT: Final = "\n[...]\n"
_CHARACTERS_PER_TOKEN: Final = 64
"""More than tokens have; what is left out need not be encoded first."""
_WAY_OUT: Final = "set rollout.environment.history='per_turn', which trains each turn after its own prompt"
_TOOL_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class TurnFormat:
    """How observations follow turns, for one tokenizer and the tools that its prompts show."""

    tokenizer: PreTrainedTokenizerFast
    ends: tuple[int, ...]
    """Tokens that end a turn, ascending."""
    tools: tuple[ToolSchema, ...]
    is_chat: bool
    """Whether prompts are chats; after plain text, observations are text, too."""
    in_parts: bool
    """Whether the chat template takes contents as lists of parts."""
    control: re.Pattern[str] = field(repr=False)
    """Finds control tokens: special ones, and those that the template writes."""

    def observation(self, messages: Sequence[Message], *, ended: bool = True) -> tuple[int, ...]:
        """Tokens that follow a turn: the messages, up to where the next turn begins.

        Their roles are `tool`, with the tool's name, and `user`. `ended` says whether the turn's last token is one of
        `ends`; if not, since a text stopped it, the one that the template would have written comes first. After plain
        text, the messages' texts are all there is. Raises BadInput where the template has no such messages, ValueError
        where it refuses these.
        """
        texts = [text_of(message.content) for message in messages]
        if not self.is_chat:
            return self._encoded("".join(texts))
        separator = separator_for("".join(texts))
        broken = [self.broken(text, separator) for text in texts]
        text, end = _answer(
            self, [Message(each.role, text, each.name) for each, text in zip(messages, broken, strict=True)]
        )
        tokens = self.pieces(text.split(separator), behind=end)
        return tokens if ended or not end else (_id(self.tokenizer, end), *tokens)

    def shortened(self, text: str, most: int) -> str:
        """Cut the middle out of a text that takes more tokens than this, and mark the place in at most seven."""
        longest = most * _CHARACTERS_PER_TOKEN
        if len(text) <= longest and self.num_tokens(text) <= most:
            return text
        low, high = 0, min(len(text) - 1, longest)
        while low < high:
            kept = (low + high + 1) // 2
            low, high = (kept, high) if self.num_tokens(_without_middle(text, kept)) <= most else (low, kept - 1)
        return _without_middle(text, low)

    def num_tokens(self, text: str) -> int:
        """Count the tokens of a text, without what a template writes around it."""
        return len(self._encoded(text))

    def rendered(self, chats: Sequence[Chat], *, generation_prompt: bool) -> list[str]:
        """Spell chats out, with the tools. Raises TemplateFailed."""
        return render_chats(chats, self.tokenizer, generation_prompt=generation_prompt, tools=self.tools)

    def spelt(self, message: Message) -> dict[str, object]:
        """Spell a message as the template reads it."""
        text = text_of(message.content)
        return replace(message, content=(text,) if self.in_parts else text).spelt()

    def _encoded(self, text: str) -> tuple[int, ...]:
        separator = separator_for(text)
        return self.pieces(self.broken(text, separator).split(separator))

    def broken(self, text: str, separator: str) -> str:
        """Put a separator behind each character with which a control token begins, be it within another."""
        return re.sub(f"(?=(?:{self.control.pattern})).", rf"\g<0>{separator}", text, flags=re.DOTALL)

    def pieces(self, pieces: Sequence[str], *, behind: str = "") -> tuple[int, ...]:
        """Encode each piece on its own, as it is encoded behind a token that ends a turn."""
        anchor = behind or str(self.tokenizer.eos_token)
        found: list[int] = []
        for piece in pieces:
            first, *tokens = self.tokenizer(anchor + piece, add_special_tokens=False)["input_ids"]
            assert first == _id(self.tokenizer, anchor), f"{anchor!r} is a token of its own"
            found += tokens
        return tuple(found)


def turn_format(
    tokenizer: PreTrainedTokenizerFast,
    *,
    stated: Collection[int] = (),
    tools: Sequence[ToolSchema] = (),
    is_chat: bool = True,
) -> TurnFormat:
    """Learn how a policy's turns end and go on. Raises BadInput.

    `stated` are the tokens that end a completion by the model's own settings. If the template writes neither one of
    them nor EOS behind the last turn of a chat, then the control token that it writes there ends turns, too, as Gemma's
    `<end_of_turn>`.
    """
    if is_chat and not tokenizer.chat_template:
        raise BadInput("the policy's tokenizer has no chat template, which an environment's messages need")
    written = str(tokenizer.chat_template) if is_chat else ""
    added = (token for token in tokenizer.added_tokens_decoder.values() if token.special or token.content in written)
    control = sorted({token.content for token in added if len(token.content) > 1}, key=len, reverse=True)
    found = TurnFormat(
        tokenizer,
        ends=tuple(sorted({*stated, tokenizer.eos_token_id})),
        tools=tuple(tools),
        is_chat=is_chat,
        in_parts=is_chat and not takes_texts(tokenizer),
        control=re.compile("|".join(map(re.escape, control)) or "(?!)"),
    )
    if not is_chat:
        return found
    return replace(found, ends=tuple(sorted({*found.ends, *_own_end(found)})))


def _own_end(form: TurnFormat) -> list[int]:
    chat = [form.spelt(QUESTION), form.spelt(Message("assistant", TURN))]
    try:
        [text] = form.rendered([chat], generation_prompt=False)
    except TemplateFailed as error:
        raise BadInput(f"the policy's chat template {reason_of(error)}") from error
    closing = text[text.rfind(TURN) + len(TURN) :]
    own = form.control.search(closing)
    return [] if own is None or _first_end(form, closing) else [_id(form.tokenizer, own[0])]


def check_preserves(form: TurnFormat, *, role: str, where: str) -> None:
    """Refuse a template that writes earlier messages of a chat otherwise once turns and messages of this role follow.

    It would show a policy other tokens than those that it learnt from. The turns have thoughts, which some templates
    leave out of earlier ones. Nor may what follows a turn depend on how many there were. `where` begins the message.
    Raises BadInput.
    """
    if not form.is_chat:
        return
    steps = _growing_chat(form, Message(role, REPLY, "find" if role == "tool" else ""))
    for at, (before, after) in enumerate(pairwise(steps), start=1):
        if not after.text.startswith(before.kept):
            raise BadInput(
                f"{where}: the policy's chat template writes {_changed(steps[:at], after)} otherwise once a message of "
                f"role {after.role!r} follows: earlier tokens would not be those that were sampled; {_WAY_OUT}"
            )
    if len({after.text.removeprefix(turn.kept) for turn, after in pairwise(steps) if after.role == role}) > 1:
        raise BadInput(
            f"{where}: the policy's chat template writes a message of role {role!r} otherwise after a later turn: what "
            f"follows a turn would not depend on the message alone; {_WAY_OUT}"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """A chat up to one of its messages."""

    role: str
    alone: str
    """Without what prompts a turn, or follows its end."""
    kept: str
    """What is to be seen again in later steps: all but what follows the end of a turn."""
    text: str


def _growing_chat(form: TurnFormat, answer: Message) -> list[_Step]:
    turn, probe = _synthetic(form, [answer])
    _end_of_turn(form, turn, probe)
    turn |= form.spelt(Message("assistant", _THOUGHTS if "tool_calls" in turn else _THOUGHTS + TURN))
    question, _, reply = _chat(form, turn, [answer])
    chat = [question, *[turn, reply] * 3]
    so_far = [chat[:length] for length in range(1, len(chat) + 1)]
    try:
        written = form.rendered(so_far, generation_prompt=False)
        prompts = form.rendered(so_far, generation_prompt=True)
    except TemplateFailed as error:
        raise BadInput(f"the policy's chat template {reason_of(error)}") from error
    steps = []
    for message, text, prompt in zip(chat, written, prompts, strict=True):
        kept = text[: _end_of_turn(form, turn, text)[0]] if message is turn else prompt
        alone, whole = (kept, text) if message is turn else (text, prompt)
        steps.append(_Step(str(message["role"]), alone, kept, whole))
    return steps


def _changed(steps: Sequence[_Step], after: _Step) -> str:
    same = len(commonprefix([steps[-1].kept, after.text]))  # noqa: RUF071 -- of texts
    roles = [step.role for step in steps if len(step.alone) > same]
    return f"an earlier message of role {roles[0]!r}" if roles else "the beginning of a turn"


# ---- synthetic chats
def _answer(form: TurnFormat, messages: Sequence[Message]) -> tuple[str, str]:
    """Render what follows a turn; also the token that ends the turn, nothing where the template writes none."""
    turn, probe = _synthetic(form, messages)
    cut, end = _end_of_turn(form, turn, probe)
    try:
        [text] = form.rendered([_chat(form, turn, messages)], generation_prompt=True)
    except TemplateFailed as error:
        raise ValueError(f"the policy's chat template {reason_of(error)}") from error
    if not text.startswith(probe[:cut]):
        raise ValueError("the policy's chat template writes a turn otherwise before this observation")
    return text[cut:], end


def _synthetic(form: TurnFormat, messages: Sequence[Message]) -> tuple[dict[str, object], str]:
    """Find a turn that the template takes before such messages; also the chat with words in their place."""
    probes = [Message(message.role, REPLY, message.name) for message in messages]
    reason = ""
    for turn in _turns(form, messages):
        try:
            [probe] = form.rendered([_chat(form, turn, probes)], generation_prompt=True)
        except TemplateFailed as error:
            reason = reason_of(error)
            continue
        if TURN in probe and probe.count(REPLY) >= len(probes):
            return turn, probe
        reason = "leaves them out"
    roles = ", ".join(dict.fromkeys(message.role for message in messages))
    raise BadInput(f"the policy's chat template takes no messages of role {roles} after a turn: it {reason}")


def _turns(form: TurnFormat, messages: Sequence[Message]) -> Iterator[dict[str, object]]:
    """Spell turns that messages may answer: one that calls the tools; plain text where a template takes no such."""
    names = [_tool_name(message) for message in messages if message.role == "tool"]
    if names:
        calls = [spelt_call(name, {"of": TURN}, number=number) for number, name in enumerate(names)]
        yield {**form.spelt(Message("assistant", "")), "tool_calls": calls}
    yield form.spelt(Message("assistant", TURN))


def _chat(form: TurnFormat, turn: dict[str, object], messages: Sequence[Message]) -> Chat:
    return [form.spelt(QUESTION), turn, *spelt_answers(form, messages)]


def spelt_answers(form: TurnFormat, messages: Sequence[Message]) -> Chat:
    """Spell what is said to a turn; messages of tools answer its calls in their order."""
    chat, numbers = Chat(), count()
    for message in messages:
        if message.role == "tool":
            named = form.spelt(replace(message, name=_tool_name(message)))
            chat.append({**named, "tool_call_id": call_id(next(numbers))})
        else:
            chat.append(form.spelt(message))
    return chat


def _end_of_turn(form: TurnFormat, turn: dict[str, object], text: str) -> tuple[int, str]:
    """Say where the last synthetic turn of a chat ends, and with which token; with nothing where none is written.

    It is the first one behind the turn that ends turns; else, where the template ends its last turn otherwise than
    earlier ones, as GPT-OSS, the first control token.
    """
    begin = text.rfind(TURN) + len(TURN)
    closing, answered, _ = text[begin:].partition(REPLY)
    found = _first_end(form, closing)
    if found is None and "tool_calls" in turn and answered:
        raise BadInput(
            f"the policy's chat template ends a call with no token that ends a turn, {form.ends}; "
            "add the one that it writes to eos_token_id of generation_config.json"
        )
    if found is None and answered:
        [last] = form.rendered([[form.spelt(QUESTION), turn]], generation_prompt=False)
        if form.control.search(last, last.rfind(TURN)):
            found = form.control.search(closing)
    return (begin + found.end(), found[0]) if found else (begin, "")


def _first_end(form: TurnFormat, text: str) -> re.Match[str] | None:
    spelt = [str(token) for token in form.tokenizer.convert_ids_to_tokens(form.ends) if token]
    return re.search("|".join(map(re.escape, sorted(spelt, key=len, reverse=True))), text)


# ---- texts
def text_of(content: Content) -> str:
    parts = (content,) if isinstance(content, str) else content
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("an observation is text, found an image in it")
    return "".join(map(str, parts))


def _tool_name(message: Message) -> str:
    """Take a tool's name as it is, unless a policy could have made up a token with it."""
    return message.name if _TOOL_NAME.fullmatch(message.name) else "unknown"


def separator_for(text: str) -> str:
    return next(mark for mark in map(chr, _PRIVATE_USE) if mark not in text)


def _without_middle(text: str, kept: int) -> str:
    return text[: (kept + 1) // 2] + _LEFT_OUT + text[len(text) - kept // 2 :]


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))


def reason_of(error: TemplateFailed) -> str:
    return next(iter(str(error).splitlines()))
