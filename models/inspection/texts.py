"""Notes in the plan of a run about control tokens in its prompts and at the end of turns. Torch-free."""

import json
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from models.config.texts import TextRules
from models.data.examples import Preference
from models.data.problems import Problem, Prompt, TemplateArguments
from models.text.control_tokens import ControlTokens
from models.text.template_fields import count_unread_fields
from models.text.turn_end import find_turn_end
from models.vision.processor import VisionProcessor


def list_text_notes(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    rules: TextRules,
    processor: VisionProcessor | None = None,
    examples: Sequence[Problem] = (),
) -> list[str]:
    """Return notes on the texts of problems. The warm-up trains on the answers of `examples`."""
    control = ControlTokens.of(tokenizer, images=[] if processor is None else [processor.placeholder])
    prompts = [(each.source, control.find(each.prompt)) for each in problems]
    answers = [
        (each.source, control.find_special(text))
        for each in examples
        for text in each.worked_turns or (each.worked or each.answer,)
    ]
    return [
        *_describe_contained(prompts, "prompt", rules),
        *_describe_contained(answers, "completion of the warm-up", rules),
        *_describe_end(problems, tokenizer, rules),
        *_describe_unread([(each.prompt, each.template) for each in problems], tokenizer, "prompts"),
    ]


def list_preference_notes(
    pairs: Sequence[Preference], tokenizer: PreTrainedTokenizerFast, *, rules: TextRules
) -> list[str]:
    """Return notes on preference pairs, like those of `list_text_notes`."""
    control = ControlTokens.of(tokenizer)
    prompts = [(each.source, control.find(each.prompt)) for each in pairs]
    texts = [(each.source, control.find_special(text)) for each in pairs for text in (each.chosen, each.rejected)]
    return [
        *_describe_contained(prompts, "prompt of preference pairs", rules),
        *_describe_contained(texts, "completion of preference pairs", rules),
        *_describe_unread([(each.prompt, each.template) for each in pairs], tokenizer, "pairs of preferences"),
    ]


def _describe_unread(
    prompts: Sequence[tuple[Prompt, TemplateArguments]], tokenizer: PreTrainedTokenizerFast, what: str
) -> Iterator[str]:
    """Yield a note if the chat template ignores some of the fields of messages, tools or variables. `what` names the
    data."""
    if unread := count_unread_fields(prompts, tokenizer):
        fields = ", ".join(f"{name} ({rows:,} {what})" for name, rows in unread.items())
        yield f"The policy's chat template does not read {fields}, so the policy does not see these values."


def _describe_contained(tokens: Sequence[tuple[str, str | None]], noun: str, rules: TextRules) -> Iterator[str]:
    """Yield a note if texts contain control tokens. `tokens` has the origin of each text and its first control token.

    `noun` names one text.
    """
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
