"""Helpers shared by the engines: conversion of requests to rows, checks, end-of-completion rules and decoding of text.

Importing this module does not import torch.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.context import usable_context
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.protocol import Request
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """One completion to generate: its input, its random seed and the index of the request to which it belongs."""

    request: int
    sample: int
    prompt_row: int
    input: ModelInput
    """Prompt, followed by the tokens that the completion already has. The KV cache is filled with all of these tokens
    at first."""
    seed: int
    limit: int
    """Maximum length in tokens in this iteration, including existing tokens. The completion is cut at this length."""

    @property
    def num_existing_tokens(self) -> int:
        """Number of tokens that were generated for the completion in earlier iterations or turns."""
        return self.input.num_completion_tokens

    @property
    def turn_start(self) -> int:
        """Index, within the completion, of the first token of the current turn (the reply that is being generated)."""
        return self.num_existing_tokens - min(self.num_existing_tokens, self.input.num_turn_tokens)


def generation_settings(directory: Path) -> GenerationConfig:
    """Read the generation settings of a model, such as its EOS tokens, as transformers does when it loads the model."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    return GenerationConfig.from_model_config(settings)


def context_of(directory: Path) -> int | None:
    """Return the context length of the model in a directory in tokens, or None if its config.json sets no limit."""
    text = text_settings(directory)
    longest = text.get("max_position_embeddings")
    return usable_context(longest if isinstance(longest, int) else None, text)


def text_settings(directory: Path) -> dict[str, object]:
    """Return the language model's part of a model's config.json, under the names that transformers uses."""
    from transformers import AutoConfig  # imports torch

    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    return {**text.to_dict(), "max_position_embeddings": getattr(text, "max_position_embeddings", None)}


def build_rows(requests: Iterable[Request], *, longest: int) -> list[CompletionRow]:
    """Return one row per requested completion, in the order of the requests. `longest` is the maximum length of a
    completion, in tokens, if its request sets none."""
    return [row for index, request in enumerate(requests) for row in _rows(index, request, longest)]


def _rows(index: int, request: Request, longest: int) -> list[CompletionRow]:
    longest = longest if request.max_tokens is None else request.max_tokens
    budget = longest if request.budget is None else request.budget
    return [
        CompletionRow(
            request=index,
            sample=sample,
            prompt_row=request.row,
            input=each,
            seed=seed,
            limit=min(longest, each.num_completion_tokens + budget),
        )
        for sample, (each, seed) in enumerate(zip(request.inputs, request.seeds, strict=True))
    ]


def require_engine_room(
    requests: Sequence[Request], sampling: SamplingConfig, *, context: int | None, owner: str = "the policy"
) -> None:
    """Check that every prompt has a token and leaves room for its completions within `context` tokens. Raises BadInput
    if a prompt is empty, if a completion already has its maximum length, or if prompt and completion together exceed
    the context. `owner` names the policy or server whose limit it is."""
    for request in requests:
        length = request.num_prompt_tokens
        if length == 0:
            raise BadInput(
                f"prompt row {request.row} has no tokens, but a prompt needs at least one. Remove the row, or add "
                "text to the prompt"
            )
        longest = max(each.num_completion_tokens for each in request.inputs)
        limit = sampling.max_new_tokens if request.max_tokens is None else request.max_tokens
        if longest >= limit:
            raise BadInput(
                f"prompt row {request.row}: a completion that should be continued already has "
                f"{format_count(longest, 'token')}, but max_new_tokens allows only {limit}. Raise max_new_tokens"
            )
        if context is not None and length + limit > context:
            raise BadInput(
                f"prompt row {request.row}: {format_count(length, 'prompt token')} plus max_new_tokens ({limit}) are "
                f"{length + limit} tokens, but the context of {owner} is only {context}. Shorten the prompt, or lower "
                "max_new_tokens"
            )


def require_context(
    prompts: Sequence[ModelInput], longest: int, *, context: int | None, owner: str = "the policy"
) -> None:
    """Check that no prompt is empty and that a continuation of `longest` tokens fits after each prompt within `context`
    tokens. Raises BadInput otherwise. `owner` names the policy or server whose limit it is."""
    for row, prompt in enumerate(prompts):
        if not len(prompt) or (context is not None and len(prompt) + longest > context):
            raise BadInput(
                f"prompt {row} has {format_count(len(prompt), 'token')} and the longest continuation has {longest}. A "
                f"prompt needs at least one token, and both together must fit into the context of {owner}, which is "
                f"{context} tokens. Shorten the prompt"
            )


def end_tokens(tokenizer: PreTrainedTokenizerFast, settings: GenerationConfig) -> tuple[int, ...]:
    """Return the IDs of the EOS tokens that the tokenizer and the model's generation settings name, in ascending
    order."""
    return tuple(sorted({tokenizer.eos_token_id, *stated_ends(settings)} - {None}))


def stated_ends(settings: GenerationConfig) -> tuple[int, ...]:
    """Return the IDs of the tokens that end a completion according to a model's generation_config.json."""
    stated = settings.eos_token_id
    if stated is None:
        return ()
    return tuple(stated) if isinstance(stated, list) else (stated,)


def suppressed_tokens(settings: GenerationConfig) -> tuple[int, ...]:
    """Return, in ascending order, the IDs of tokens that a model must never generate according to its
    generation_config.json."""
    return tuple(sorted(settings.suppress_tokens or ()))


def stop_window(stop: Collection[str]) -> int:
    """Return how many of a completion's last tokens must be decoded to text in order to detect any of the stop
    texts."""
    # 4 more tokens, because the first ones may be the rest of a multi-byte character, which decodes to another
    # character.
    return max(len(text.encode()) for text in stop) + 4


def decode_texts(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Decode several token sequences to texts, without special tokens."""
    texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts


def length_finish_reason(length: int, longest: int) -> FinishReason:
    """Return the finish reason of a completion of `length` tokens that has not ended by itself: LENGTH if it has the
    maximum length `longest`, else CUT, because the iteration's token budget was used up."""
    return FinishReason.LENGTH if length == longest else FinishReason.CUT
