"""Token sequences for models: examples to train on, texts to score, and pairs of texts. Torch-free."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.data.examples import Example, Preference
from models.records.model_input import ModelInput
from models.text.chats import TemplateFailed, render_chats
from models.text.tokenizer import render, tokenize_prompts
from models.vision.processor import VisionProcessor

_FIELD: Final = re.compile(r"\{(prompt|completion)\}")


@dataclass(frozen=True, slots=True)
class SequencePair:
    """Better and worse completion of a prompt, tokenized."""

    chosen: ModelInput
    rejected: ModelInput

    @property
    def size(self) -> int:
        """Number of tokens that the pair occupies in a forward pass, including padding."""
        return 2 * max(len(self.chosen), len(self.rejected))


def example_inputs(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    *,
    source: str,
    processor: VisionProcessor | None = None,
) -> list[ModelInput]:
    """Tokenize examples: prompts as for generation, completions with EOS at the end. Equal texts are tokenized once.

    `source` is the origin of the examples for messages. Raises BadInput if a prompt cannot be tokenized.
    """
    distinct_prompts = list(dict.fromkeys((each.prompt, each.images, each.template) for each in examples))
    tokenized = tokenize_prompts(
        [prompt for prompt, _, _ in distinct_prompts],
        tokenizer,
        sources=[source] * len(distinct_prompts),
        images=[images for _, images, _ in distinct_prompts],
        processor=processor,
        arguments=[arguments for _, _, arguments in distinct_prompts],
    )
    inputs = {each: each_input.input for each, each_input in zip(distinct_prompts, tokenized, strict=True)}
    texts = sorted({text for each in examples for text in (each.completion, each.verdict, *each.continuation)})
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokens = dict(zip(texts, encoded, strict=True))
    return [
        _build_input(inputs[each.prompt, each.images, each.template], each, tokens, end=tokenizer.eos_token_id)
        for each in examples
    ]


def _build_input(model_input: ModelInput, example: Example, tokens: Mapping[str, list[int]], *, end: int) -> ModelInput:
    """Build the model input of one example from its tokenized texts. `end` is the EOS token."""
    if example.verdict:
        return model_input.append_completion(tokens[example.completion]).append_completion(
            [*tokens[example.verdict], end]
        )
    model_input = model_input.append_completion([*tokens[example.completion], end])
    for observation, turn in zip(example.continuation[::2], example.continuation[1::2], strict=True):
        model_input = model_input.append_observation(tokens[observation]).append_completion([*tokens[turn], end])
    return model_input


def require_completion(template: str | None, *, source: str) -> None:
    """Raise BadInput if a template has no field for the completion to score."""
    if template is not None and "completion" not in _FIELD.findall(template):
        raise BadInput(
            f"{source}: the template {template!r} does not contain {{completion}}, so all scores would be the same. "
            "Add {completion} to the template."
        )


def encode(tokenizer: PreTrainedTokenizerFast, template: str | None, *, prompt: str, completion: str) -> ModelInput:
    """Encode a prompt with its completion as the input of a scoring model.

    Uses the template if there is one, else the tokenizer's chat template, else the plain concatenation. Braces within
    the prompt or the completion are never filled in. Raises ValueError if the completion contains a special token as
    text or the chat template rejects the chat.
    """
    forged = [token for token in tokenizer.all_special_tokens if token in completion]
    if forged:  # the text would become the token, so a policy could end its turn and start another
        raise ValueError(f"the completion spells the special token {forged[0]!r}")
    texts = {"prompt": prompt, "completion": completion}
    if template is not None:
        filled = _FIELD.sub(lambda field: texts[field[1]], template)
        return ModelInput.from_prompt(tokenizer(filled)["input_ids"])
    if not tokenizer.chat_template:
        return ModelInput.from_prompt(tokenizer(prompt + completion)["input_ids"])
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    try:
        [chat] = render_chats([turns], tokenizer, generation_prompt=False)
    except TemplateFailed as error:
        raise ValueError(f"the chat template {error}") from error
    return ModelInput.from_prompt(tokenizer(chat, add_special_tokens=False)["input_ids"])


def policy_pairs(
    preferences: Sequence[Preference], tokenizer: PreTrainedTokenizerFast, *, context: int
) -> list[SequencePair]:
    """Tokenize preference pairs for training a policy: prompts as for generation, completions with EOS at the end.

    Raises BadInput if a sequence exceeds `context`.
    """
    source = f"preferences from {preferences[0].source}" if preferences else "preferences"
    examples = [
        Example(pair.prompt, text, template=pair.template)
        for pair in preferences
        for text in (pair.chosen, pair.rejected)
    ]
    return _build_pairs(preferences, example_inputs(examples, tokenizer, source=source), context=context)


def reward_pairs(
    preferences: Sequence[Preference],
    tokenizer: PreTrainedTokenizerFast,
    *,
    template: str | None,
    context: int,
) -> list[SequencePair]:
    """Tokenize preference pairs for training a reward model. The score is read at the last token that is not padding.

    Raises BadInput if the template has no field for the completion, or a text cannot be encoded or exceeds `context`.
    """
    require_completion(template, source="reward model")
    inputs: list[ModelInput] = []
    prompts = render(
        [pair.prompt for pair in preferences],
        tokenizer,
        sources=[pair.source for pair in preferences],
        arguments=[pair.template for pair in preferences],
    )
    for pair, prompt in zip(preferences, prompts, strict=True):
        for completion in (pair.chosen, pair.rejected):
            try:
                model_input = encode(tokenizer, template, prompt=prompt, completion=completion)
            except ValueError as error:
                raise BadInput(f"{pair.source}: {error}") from error
            inputs.append(_mark_last_token(model_input, tokenizer.pad_token_id))
    return _build_pairs(preferences, inputs, context=context + 1)


def _mark_last_token(model_input: ModelInput, pad: int | None) -> ModelInput:
    """Mark the last token that is not padding, where the score is read.

    Scores are read where the next token would be predicted, so an arbitrary token (0) is appended as the completion.
    """
    tokens = model_input.tokens
    end = len(tokens)
    while end and tokens[end - 1] == pad:
        end -= 1
    return ModelInput.from_prompt(tokens[:end]).append_completion([0])


def _build_pairs(
    preferences: Sequence[Preference], inputs: Sequence[ModelInput], *, context: int
) -> list[SequencePair]:
    """Combine the inputs into pairs. Raises BadInput if an input is empty or longer than `context`."""
    pairs = []
    for pair, chosen, rejected in zip(preferences, inputs[::2], inputs[1::2], strict=True):
        for name, each in (("chosen", chosen), ("rejected", rejected)):
            length = len(each)
            if not 0 < each.num_prompt_tokens < length <= context:
                raise BadInput(
                    f"{pair.source}: the prompt and the {name} completion have {length} tokens, but the model's "
                    f"context is {context}"
                )
        pairs.append(SequencePair(chosen, rejected))
    return pairs
