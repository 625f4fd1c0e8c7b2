"""Notes in the plan of a run about control tokens in its prompts and at the end of turns. Torch-free."""

import json
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from models.config.texts import NOTE, TextRules
from models.data.examples import Preference
from models.data.problems import Problem, Prompt, TemplateArguments
from models.text.chats import join_templates
from models.text.control_tokens import ControlTokens
from models.text.template_fields import count_changes, fit_chats
from models.text.tokenizer import renders_plain_text
from models.text.turn_end import find_turn_end
from models.text.unread_fields import count_unread_fields
from models.vision.processor import VisionProcessor


def text_facts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    rules: TextRules,
    processor: VisionProcessor | None = None,
) -> dict[str, float]:
    """Return notes on the texts of problems. Each note is a key with the prefix `NOTE`; the values have no meaning."""
    contained = _describe_contained_tokens(problems, tokenizer, rules, processor)
    in_parts = processor is not None and bool(tokenizer.chat_template) and not renders_plain_text(tokenizer)
    prompts = [(each.prompt, each.template) for each in problems]
    unread = _describe_unread(prompts, tokenizer, "prompts", in_parts=in_parts)
    shown = () if in_parts else _describe_changes(prompts, tokenizer)
    notes = (
        *contained,
        *_describe_end(problems, tokenizer, rules),
        *unread,
        *shown,
        *_describe_date(prompts, tokenizer),
    )
    return {f"{NOTE}{note}": 1.0 for note in notes}


def preference_facts(
    train: Sequence[Preference], heldout: Sequence[Preference], tokenizer: PreTrainedTokenizerFast
) -> dict[str, float]:
    """Return the numbers of preference pairs, and notes on their prompts in the format of `text_facts`."""
    prompts = [(each.prompt, each.template) for each in (*train, *heldout)]
    notes = {f"{NOTE}{note}": 1.0 for note in _describe_unread(prompts, tokenizer, "pairs of preferences")}
    return {"train_pairs": len(train), "heldout_pairs": len(heldout), **notes}


def _describe_unread(
    prompts: Sequence[tuple[Prompt, TemplateArguments]],
    tokenizer: PreTrainedTokenizerFast,
    what: str,
    *,
    in_parts: bool = False,
) -> Iterator[str]:
    """Yield a note if the chat template ignores some of the fields or contents of messages, tools or variables. `what`
    names the data."""
    if unread := count_unread_fields(prompts, tokenizer, in_parts=in_parts):
        fields = ", ".join(f"{name} ({rows:,} {what})" for name, rows in unread.items())
        yield f"The policy's chat template does not read {fields}, so the policy does not see these values."


def _describe_changes(
    prompts: Sequence[tuple[Prompt, TemplateArguments]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[str]:
    """Yield a note if the chat template receives values in another form than the file has."""
    chats = [(prompt, arguments) for prompt, arguments in prompts if not isinstance(prompt, str)]
    if not tokenizer.chat_template:
        return
    encoded = [[message.encode() for message in prompt] for prompt, _ in chats]
    if changes := count_changes(encoded, fit_chats(encoded, tokenizer, [arguments for _, arguments in chats])):
        forms = ", ".join(f"{change} ({rows:,} prompts)" for change, rows in changes.items())
        yield f"The policy's chat template would not show the form in the file, so it receives {forms}."


def _describe_date(
    prompts: Sequence[tuple[Prompt, TemplateArguments]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[str]:
    """Yield a note if the chat template writes the present date into prompts."""
    chats = [arguments for prompt, arguments in prompts if not isinstance(prompt, str)]
    has_dates = all(any("date" in name for name in arguments.kwargs) for arguments in chats)
    if not has_dates and "strftime_now" in join_templates(tokenizer):
        yield (
            "The policy's chat template can write the date on which a prompt is rendered (strftime_now). Prompts are "
            "rendered once for a run, but runs of other days have other prompts. If the template reads a date from a "
            "variable, set the variable in data.chat_template_kwargs."
        )


def _describe_contained_tokens(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    rules: TextRules,
    processor: VisionProcessor | None,
) -> Iterator[str]:
    """Yield a note if prompts contain control tokens."""
    control = ControlTokens.of(tokenizer, images=[] if processor is None else [processor.placeholder])
    contained = [(problem.source, token) for problem in problems if (token := control.find(problem.prompt))]
    if not contained:
        return
    source, token = contained[0]
    prompts = "1 prompt contains" if len(contained) == 1 else f"{len(contained):,} prompts contain"
    effect = (
        "They become control tokens, because data.special_tokens is 'parse'."
        if rules.parses_control_tokens
        else "They are encoded as ordinary text. If the prompts contain the markers of a chat template on purpose, set "
        "data.special_tokens = 'parse'."
    )
    yield f"{prompts} control tokens of the policy, first {json.dumps(token)} in {source}. {effect}"


def _describe_end(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, rules: TextRules) -> Iterator[str]:
    """Yield a note if the chat template ends turns with a token other than EOS."""
    if not rules.ends_as_template or all(isinstance(problem.prompt, str) for problem in problems):
        return
    end = find_turn_end(tokenizer)
    if end is not None and end.token != tokenizer.eos_token_id:
        token = json.dumps(tokenizer.convert_ids_to_tokens(end.token))
        yield (
            f"Turns end with {token}, which the chat template writes, and with the EOS token "
            f"{json.dumps(str(tokenizer.eos_token))}. Warm-up and DPO on chats train {token}."
        )
