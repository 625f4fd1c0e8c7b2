"""Completions given as messages with fields, such as tool calls: the text and tokens that a policy generates for them.

Torch-free.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.models.config.texts import TextRules
from rheostat.models.data.problems import Message, TemplateArguments
from rheostat.models.text.chats import TemplateFailed, render_chats
from rheostat.models.text.control_tokens import ControlTokens
from rheostat.models.text.message_texts import as_message
from rheostat.models.text.template_fields import fit_chats
from rheostat.models.text.turn_end import find_turn_end


@dataclass(frozen=True, slots=True)
class WrittenCompletion:
    """Completion of a training example that was given as a message: its text and tokens as the chat template renders
    the message after the prompt."""

    text: str
    """Rendered text of the message, without the token that ends the turn."""
    tokens: tuple[int, ...]
    """Token IDs of the rendered message, including the token that ends the turn."""


def write_completion(
    prompt: Sequence[Message],
    message: Message,
    tokenizer: PreTrainedTokenizerFast,
    *,
    arguments: TemplateArguments,
    rules: TextRules,
    ends: Collection[int] = (),
) -> WrittenCompletion:
    """Return the text and tokens of an assistant message, such as a tool call, as the policy would have to generate
    them after the prompt. The chat template renders the message. `ends` are the tokens that end a completion according
    to the generation config. Control tokens in the message are text, unless `rules` say otherwise. Raises BadInput if
    the template rejects the chat, or does not write the message after the prompt."""
    control, chat = ControlTokens.of(tokenizer), (*prompt, message)
    marks = None
    if not rules.parses_control_tokens:
        marks = control.choose_marks([chat, (as_message(arguments),)])
    if marks is not None:
        marked = control.mark_prompt(chat, marks)
        chat = marked if isinstance(marked, tuple) else chat
        arguments = control.mark_arguments(arguments, marks)
    before, whole = _render(chat, tokenizer, arguments)
    if not whole.startswith(before):
        raise BadInput(
            "the policy's chat template changes the text before the last message of a pair, so no completion of the "
            "prompt equals this message. Write all fields of the message into `content`, as the policy should "
            "generate them."
        )
    written, end = _cut_end(whole[len(before) :], tokenizer, ends=ends, rules=rules)
    [tokens] = control.encode([written], marks, add_special_tokens=False)
    return WrittenCompletion(marks.restore(marks.decode(written)) if marks else written, (*tokens, end))


def _render(
    chat: Sequence[Message], tokenizer: PreTrainedTokenizerFast, arguments: TemplateArguments
) -> tuple[str, str]:
    """Return a chat rendered without and with its last message. Raises BadInput if the chat template rejects the
    chat."""
    [fitted] = fit_chats([[each.encode() for each in chat]], tokenizer, [arguments])
    tools, kwargs = arguments.tools, arguments.kwargs
    try:
        [before] = render_chats([fitted[:-1]], tokenizer, generation_prompt=True, tools=tools, kwargs=kwargs)
        [whole] = render_chats([fitted], tokenizer, generation_prompt=False, tools=tools, kwargs=kwargs)
    except TemplateFailed as error:
        raise BadInput(f"the policy's chat template {error}") from error
    return before, whole


def _cut_end(
    text: str, tokenizer: PreTrainedTokenizerFast, *, ends: Collection[int], rules: TextRules
) -> tuple[str, int]:
    """Return a rendered turn without the control token at its end, and the ID of the token that ends the turn in
    training. If the template writes no control token there, this is the token with which it usually ends turns."""
    turn_end, eos = find_turn_end(tokenizer, stated=ends), int(tokenizer.eos_token_id)
    usual_end = eos if turn_end is None else turn_end.token
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = special | {str(tokenizer.convert_ids_to_tokens(token)): token for token in (*ends, eos, usual_end)}
    whole = text.rstrip()
    last = max((token for token in known if whole.endswith(token)), key=len, default="")
    written, end = (whole.removesuffix(last), known[last]) if last else (whole, usual_end)
    return written, end if rules.ends_as_template or end in ends else eos
