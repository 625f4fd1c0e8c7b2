"""Values of prompts that a policy's chat template does not show: fields of messages, roles, tools and variables."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from transformers import PreTrainedTokenizerFast

from rheostat.models.data.problems import Message, Prompt, TemplateArguments, add_image_places
from rheostat.models.text.chats import TemplateFailed, find_variables, render_chats, select_template
from rheostat.models.text.template_fields import fit_chats

KWARGS: Final = "chat_template_kwargs."
CONTENT: Final = "content of role "
_PROBES: Final = 4
"""Maximum number of prompts that are rendered with and without a value to find out whether the chat template shows the
value."""
_MARK: Final = "content6h3z"

_Rendered = tuple[Sequence[Message], TemplateArguments]


def count_unread_fields(
    prompts: Iterable[tuple[Prompt, TemplateArguments]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    in_parts: bool = False,
) -> dict[str, int]:
    """Return the number of prompts for each value that the tokenizer's chat template does not show. A value is a field
    of a message (`name`), a variable (`chat_template_kwargs.mood`), `tools`, or the content of all messages of a role
    (`content of role developer`). With `in_parts`, the template receives every content as a list of parts.

    A variable counts as shown if its name occurs in the template. Other values count as shown if one of the first
    prompts with the value is rendered differently without the value.
    """
    counts: Counter[str] = Counter()
    first: dict[str, list[_Rendered]] = {}
    variables: dict[str, frozenset[str]] = {}
    for prompt, arguments in prompts:
        if isinstance(prompt, str) or not tokenizer.chat_template:
            continue
        try:
            template = select_template(tokenizer, tools=arguments.tools)
        except TemplateFailed:
            continue
        if template not in variables:
            variables[template] = find_variables(template)
        names = {*_list_values(prompt), *(["tools"] if arguments.tools else [])}
        names |= {f"{KWARGS}{name}" for name in arguments.kwargs if name not in variables[template]}
        counts.update(names)
        for name in names:
            if len(probes := first.setdefault(name, [])) < _PROBES:
                probes.append((add_image_places(prompt, 0) if in_parts else prompt, arguments))
    unread = [name for name in sorted(counts) if not any(_shows(name, *each, tokenizer) for each in first[name])]
    return {name: counts[name] for name in unread}


def _list_values(prompt: Sequence[Message]) -> Iterator[str]:
    """Yield the names of all values in a chat that a template could show: fields of messages, such as `tool_calls`, and
    the content of each role."""
    for message in prompt:
        yield from message.fields
        if message.name:
            yield "name"
        if message.text.strip():
            yield f"{CONTENT}{message.role}"


def _shows(
    name: str, prompt: Sequence[Message], arguments: TemplateArguments, tokenizer: PreTrainedTokenizerFast
) -> bool:
    """Return whether the chat template shows the value `name`: whether a prompt is rendered differently without it. If
    the template fails, the value counts as shown."""

    def render(messages: Sequence[Message], given: TemplateArguments) -> str:
        """Render a chat with template arguments."""
        [chat] = fit_chats([[message.encode() for message in messages]], tokenizer, [given])
        [text] = render_chats([chat], tokenizer, generation_prompt=True, tools=given.tools, kwargs=given.kwargs)
        return text

    try:
        if name.startswith(CONTENT):
            role = name.removeprefix(CONTENT)
            marked = [_mark_content(each) if each.role == role else each for each in prompt]
            return _MARK in render(marked, arguments)
        if name == "tools":
            changed = prompt, replace(arguments, tools=())
        elif name.startswith(KWARGS):
            kwargs = {key: value for key, value in arguments.kwargs.items() if f"{KWARGS}{key}" != name}
            changed = prompt, replace(arguments, kwargs=kwargs)
        else:
            changed = [*_drop_field(prompt, name)], arguments
        return render(prompt, arguments) != render(*changed)
    except TemplateFailed:
        return True


def _mark_content(message: Message) -> Message:
    """Return a message whose texts are replaced by a word that no chat template writes by itself."""
    if isinstance(message.content, tuple):
        return replace(message, content=tuple(_MARK if isinstance(part, str) else part for part in message.content))
    return replace(message, content=_MARK) if message.content else message


def _drop_field(prompt: Sequence[Message], name: str) -> Iterator[Message]:
    """Yield the messages of a prompt, each without the field `name`."""
    for message in prompt:
        fields = {key: value for key, value in message.fields.items() if key != name}
        yield replace(message, name="" if name == "name" else message.name, fields=fields)
