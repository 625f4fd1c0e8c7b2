"""Rows for supervised training as model inputs: whole chats, and plain-text prompts with completions. Torch-free."""

from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import TrainedTurns
from rheostat.models.data.examples import Example
from rheostat.models.data.training_chats import TrainingChat, TrainingRow, TrainingText
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.sequences import example_inputs
from rheostat.models.text.whole_chats import ChatEncoder
from rheostat.models.vision.processor import VisionProcessor


def encode_rows(
    rows: Sequence[TrainingRow],
    tokenizer: PreTrainedTokenizerFast,
    *,
    loss: TrainedTurns,
    rules: TextRules,
    ends: Collection[int],
    processor: VisionProcessor | None,
) -> list[list[ModelInput]]:
    """Return the model inputs of each row. `ends` are the tokens that end a completion according to the generation
    config, and `processor` prepares the images of a vision-language policy. Raises BadInput if a row cannot be encoded.

    A chat template is needed only for chats. Each trained token is trained in exactly one input.
    """
    chats = [row for row in rows if isinstance(row, TrainingChat)]
    texts = [row for row in rows if isinstance(row, TrainingText)]
    encoded_chats = iter(
        ChatEncoder(tokenizer, loss=loss, rules=rules, ends=ends, processor=processor).encode(chats) if chats else ()
    )
    encoded_texts = iter(_encode_texts(texts, tokenizer, loss=loss, rules=rules, processor=processor) if texts else ())
    return [next(encoded_chats) if isinstance(row, TrainingChat) else [next(encoded_texts)] for row in rows]


def _encode_texts(
    texts: Sequence[TrainingText],
    tokenizer: PreTrainedTokenizerFast,
    *,
    loss: TrainedTurns,
    rules: TextRules,
    processor: VisionProcessor | None,
) -> list[ModelInput]:
    """Return the model inputs of plain-text prompts and completions, and of whole plain texts, each with an EOS token
    at the end. Raises BadInput if a row cannot be encoded."""
    input_errors = InputErrors()
    for each in texts:
        with input_errors.collect(each.source):
            if (loss == "all" or each.completion is None) and each.images:
                raise BadInput(
                    f"{each.source}: warmup.chats.loss = 'all' would train image tokens, which a policy never "
                    "generates. Use 'assistant'."
                    if each.completion is not None
                    else f"{each.source}: a plain text that is trained as a whole cannot have images. Remove "
                    "warmup.chats.images_column, or use rows with a prompt and a completion."
                )
    input_errors.check()
    examples = [
        Example(_drop_end(each.prompt, tokenizer, rules), "")
        if each.completion is None
        else Example(each.prompt, _drop_end(each.completion, tokenizer, rules), each.images)
        for each in texts
    ]
    source = f"{texts[0].source.rpartition(':')[0] or texts[0].source}: a prompt"
    inputs = example_inputs(examples, tokenizer, source=source, processor=processor, rules=rules)
    return [
        ModelInput.from_prompt(each_input.tokens[:1]).append_completion(each_input.tokens[1:])
        if loss == "all" or each.completion is None
        else each_input
        for each, each_input in zip(texts, inputs, strict=True)
    ]


def _drop_end(text: str, tokenizer: PreTrainedTokenizerFast, rules: TextRules) -> str:
    """Return a trained text without an EOS token at its end, which is added to every trained text. Unchanged if control
    tokens in texts are ordinary text."""
    return text.removesuffix(str(tokenizer.eos_token)) if rules.parses_control_tokens else text


def enforce_chat_length(
    inputs: Sequence[list[ModelInput]], sources: Sequence[str], *, context: int, too_long: Literal["refuse", "drop"]
) -> list[list[ModelInput]]:
    """Handle chats with an input of more than `context` tokens: "drop" leaves them out, "refuse" raises BadInput that
    lists them. Returns the inputs of the remaining chats. Raises BadInput if no chat remains."""
    kept, input_errors = list[list[ModelInput]](), InputErrors()
    for each, source in zip(inputs, sources, strict=True):
        length = max(map(len, each))
        if length <= context:
            kept.append(each)
        elif too_long == "refuse":
            with input_errors.collect(source):
                raise BadInput(
                    f"{source}: the chat has {format_count(length, 'token')}, but the policy's context is {context}. "
                    "Shorten the chat, or set warmup.chats.on_too_long = 'drop'."
                )
    input_errors.check()
    if inputs and not kept:
        raise BadInput(
            f"warmup.chats.on_too_long = 'drop' leaves no chat: all {len(inputs)} have more than {context} tokens, the "
            "policy's context."
        )
    return kept
