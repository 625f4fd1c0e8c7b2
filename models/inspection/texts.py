"""Notes in the plan of a run about control tokens in its prompts and at the end of turns. Torch-free."""

import json
from collections.abc import Iterator, Sequence
from typing import Final

from transformers import PreTrainedTokenizerFast

from rheostat.models.config.texts import TextRules
from rheostat.models.data.preferences import Preference
from rheostat.models.data.problems import Problem, Prompt, TemplateArguments
from rheostat.models.data.training_chats import TrainingChat, TrainingRow
from rheostat.models.text.chats import join_templates
from rheostat.models.text.control_tokens import ControlTokens
from rheostat.models.text.template_fields import count_changes, fit_chats
from rheostat.models.text.tokenizer import renders_plain_text
from rheostat.models.text.turn_end import find_turn_end
from rheostat.models.text.unread_fields import count_unread_fields
from rheostat.models.vision.processor import VisionProcessor

MISSING_WORDS: Final = frozenset(("none", "null", "na", "n/a", "nan", "nil", "missing", "inf", "infinity", "-infinity"))
"""Words, in lower case, that data frames and programs write in place of missing answers."""


def list_text_notes(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    rules: TextRules,
    processor: VisionProcessor | None = None,
    examples: Sequence[Problem] = (),
) -> list[str]:
    """Return remarks for the user on the texts of problems, such as control tokens in prompts. The warm-up trains on
    the answers of `examples`."""
    control = ControlTokens.of(tokenizer, images=[] if processor is None else [processor.placeholder])
    contained = [(each.source, control.find(each.prompt)) for each in problems]
    answers = [
        (each.source, control.find_special(text))
        for each in examples
        for text in each.worked_turns or (each.worked or each.answer,)
    ]
    in_parts = processor is not None and bool(tokenizer.chat_template) and not renders_plain_text(tokenizer)
    prompts = [(each.prompt, each.template) for each in problems]
    return [
        *_describe_contained(contained, "prompt", rules),
        *_describe_contained(answers, "completion of the warm-up", rules),
        *_describe_missing(problems),
        *_describe_end(problems, tokenizer, rules),
        *_describe_unread(prompts, tokenizer, "prompts", in_parts=in_parts),
        *(() if in_parts else _describe_changes(prompts, tokenizer)),
        *_describe_date(prompts, tokenizer),
    ]


def list_preference_notes(
    pairs: Sequence[Preference], tokenizer: PreTrainedTokenizerFast, *, rules: TextRules
) -> list[str]:
    """Return remarks for the user on the texts of preference pairs, such as control tokens in prompts."""
    control = ControlTokens.of(tokenizer)
    prompts = [(each.source, control.find(each.prompt)) for each in pairs]
    texts = [
        (each.source, control.find_special(text) if message is None else control.find((message,)))
        for each in pairs
        for text, message in each.completions
    ]
    return [
        *_describe_contained(prompts, "prompt of preference pairs", rules),
        *_describe_contained(texts, "completion of preference pairs", rules),
        *_describe_unread([(each.prompt, each.template) for each in pairs], tokenizer, "pairs of preferences"),
    ]


def list_chat_notes(rows: Sequence[TrainingRow], tokenizer: PreTrainedTokenizerFast, *, rules: TextRules) -> list[str]:
    """Return remarks for the user on the chats on which the warm-up trains, such as control tokens in their texts."""
    control = ControlTokens.of(tokenizer)
    chats = [row for row in rows if isinstance(row, TrainingChat)]
    contained = [(each.source, control.find(each.messages)) for each in chats]
    contained += [
        (each.source, control.find(each.prompt) or control.find_special(each.completion or ""))
        for each in rows
        if not isinstance(each, TrainingChat)
    ]
    prompts = [(each.messages, each.template) for each in chats]
    return [
        *_describe_contained(contained, "chat of the warm-up", rules),
        *_describe_unread(prompts, tokenizer, "chats of the warm-up"),
        *_describe_changes(prompts, tokenizer),
    ]


def _describe_unread(
    prompts: Sequence[tuple[Prompt, TemplateArguments]],
    tokenizer: PreTrainedTokenizerFast,
    what: str,
    *,
    in_parts: bool = False,
) -> Iterator[str]:
    """Yield a remark for the user if the chat template ignores some of the message fields, message contents, tools or
    variables in the prompts. `what` names the data."""
    if unread := count_unread_fields(prompts, tokenizer, in_parts=in_parts):
        fields = ", ".join(f"{name} ({rows:,} {what})" for name, rows in unread.items())
        yield (
            f"The policy's chat template does not read {fields} of the messages, so the policy does not receive these "
            "values."
        )


def _describe_changes(
    prompts: Sequence[tuple[Prompt, TemplateArguments]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[str]:
    """Yield a remark for the user if some values of the prompts are passed to the chat template in another form than
    the data file has."""
    chats = [(prompt, arguments) for prompt, arguments in prompts if not isinstance(prompt, str)]
    if not tokenizer.chat_template:
        return
    encoded = [[message.encode() for message in prompt] for prompt, _ in chats]
    if changes := count_changes(encoded, fit_chats(encoded, tokenizer, [arguments for _, arguments in chats])):
        forms = ", ".join(f"{change} ({rows:,} prompts)" for change, rows in changes.items())
        yield (
            "The policy's chat template cannot render some values in the form that they have in the file, so it "
            f"receives {forms} instead."
        )


def _describe_date(
    prompts: Sequence[tuple[Prompt, TemplateArguments]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[str]:
    """Yield a remark for the user if the chat template writes the current date into prompts."""
    chats = [arguments for prompt, arguments in prompts if not isinstance(prompt, str)]
    has_dates = all(any("date" in name for name in arguments.kwargs) for arguments in chats)
    if not has_dates and "strftime_now" in join_templates(tokenizer):
        yield (
            "The policy's chat template can write the date on which a prompt is rendered (strftime_now). Prompts are "
            "rendered once for a run, but runs of other days have other prompts. If the template reads a date from a "
            "variable, set the variable in data.chat_template_kwargs."
        )


def _describe_contained(tokens: Sequence[tuple[str, str | None]], noun: str, rules: TextRules) -> Iterator[str]:
    """Yield a remark for the user if texts contain control tokens. `tokens` has the origin of each text and its first
    control token. `noun` is the word for one text."""
    contained = [(source, token) for source, token in tokens if token is not None]
    if not contained:
        return
    source, token = contained[0]
    head, *rest = noun.split(" ", 1)
    plural = " ".join([f"{len(contained):,} {head}s", *rest])
    texts = f"1 {noun} contains" if len(contained) == 1 else f"{plural} contain"
    effect = (
        "They become control tokens, because data.special_tokens is 'parse'."
        if rules.parses_control_tokens
        else "They are encoded as ordinary text. If the texts contain the markers of a chat template on purpose, set "
        "data.special_tokens = 'parse'."
    )
    yield f"{texts} control tokens of the policy, first {json.dumps(token)} in {source}. {effect}"


def _describe_missing(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield a remark for the user if some answers are words that data frames write for missing values."""
    suspects = [problem for problem in problems if problem.answer.strip().casefold() in MISSING_WORDS]
    if suspects:
        is_one, first = len(suspects) == 1, f"{json.dumps(suspects[0].answer)} in {suspects[0].source}"
        answers = (
            f"1 answer is a word that often stands for a missing value: {first}"
            if is_one
            else f"{len(suspects):,} answers are words that often stand for a missing value, first {first}"
        )
        used = "It is used as a reference answer" if is_one else "They are used as reference answers"
        yield f"{answers}. {used}. If an answer is missing, remove its row."


def _describe_end(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, rules: TextRules) -> Iterator[str]:
    """Yield a remark for the user if the chat template ends turns with a token other than EOS."""
    if not rules.ends_as_template or all(isinstance(problem.prompt, str) for problem in problems):
        return
    end = find_turn_end(tokenizer)
    if end is not None and end.token != tokenizer.eos_token_id:
        token = json.dumps(tokenizer.convert_ids_to_tokens(end.token))
        yield (
            f"Turns end with {token}, which the chat template writes, and with the EOS token "
            f"{json.dumps(str(tokenizer.eos_token))}. Warm-up and DPO on chats train {token}."
        )
