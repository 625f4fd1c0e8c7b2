"""Notes for the plan of a run on the control tokens in its prompts and at the end of turns. Torch-free."""

import json
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from models.config.texts import NOTE, TextRules
from models.data.problems import Problem
from models.text.control_tokens import ControlTokens
from models.text.turn_end import find_turn_end
from models.vision.processor import VisionProcessor


def text_facts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    rules: TextRules,
    processor: VisionProcessor | None = None,
) -> dict[str, float]:
    """Return notes on the texts of problems as facts: each key is a note after the prefix `NOTE`."""
    contained = _describe_contained_tokens(problems, tokenizer, rules, processor)
    notes = (*contained, *_describe_end(problems, tokenizer, rules))
    return {f"{NOTE}{note}": 1.0 for note in notes}


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
    """Yield a note if the chat template ends turns with another token than EOS."""
    if not rules.ends_as_template or all(isinstance(problem.prompt, str) for problem in problems):
        return
    end = find_turn_end(tokenizer)
    if end is not None and end.token != tokenizer.eos_token_id:
        token = json.dumps(tokenizer.convert_ids_to_tokens(end.token))
        yield (
            f"Turns end with {token}, which the chat template writes, and with the EOS token "
            f"{json.dumps(str(tokenizer.eos_token))}. Warm-up and DPO on chats train {token}."
        )
