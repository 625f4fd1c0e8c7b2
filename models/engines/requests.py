"""What engines share: from requests to rows and their checks, what ends a completion, and its text. Torch-free."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from infra.errors import BadInput
from models.config.context import usable_context
from models.config.engines import SamplingConfig
from models.engines.protocol import Request
from models.records.model_input import ModelInput
from models.records.schemas import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """One completion to be made: what it follows (`request`-th of the work) and the seed of its draws."""

    request: int
    sample: int
    prompt_row: int
    input: ModelInput
    """The prompt, and what the completion already has: all that is prefilled."""
    seed: int
    limit: int
    """Tokens of the completion, those that it already has included, at which it ends for now."""

    @property
    def begun(self) -> int:
        """Tokens that the completion already has."""
        return self.input.num_completion_tokens

    @property
    def turn(self) -> int:
        """Index, in the completion, of the first token of the turn that is written."""
        return self.begun - min(self.begun, self.input.num_turn_tokens)


def generation_settings(directory: Path) -> GenerationConfig:
    """Read what a model says about its end, as transformers does when it loads it."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    return GenerationConfig.from_model_config(settings)


def context_of(directory: Path) -> int | None:
    """Return how many tokens the model of a directory reads at most; None if its config.json does not limit them."""
    text = text_settings(directory)
    longest = text.get("max_position_embeddings")
    return usable_context(longest if isinstance(longest, int) else None, text)


def text_settings(directory: Path) -> dict[str, object]:
    """Return the settings of the language model of a directory, with names as transformers reads them."""
    from transformers import AutoConfig  # which brings torch in

    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    return {**text.to_dict(), "max_position_embeddings": getattr(text, "max_position_embeddings", None)}


def rows_of(requests: Iterable[Request], *, longest: int) -> list[CompletionRow]:
    """Say of each wanted completion what it has and where it ends; those of one request are neighbours."""
    return [row for index, request in enumerate(requests) for row in _rows(index, request, longest)]


def _rows(index: int, request: Request, longest: int) -> list[CompletionRow]:
    longest = longest if request.longest is None else request.longest
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
    requests: Sequence[Request], sampling: SamplingConfig, *, context: int | None, whose: str = "the policy"
) -> None:
    """Refuse an empty prompt, and one that leaves no room for its completions in the context of policy or server."""
    for request in requests:
        length = request.num_prompt_tokens
        if length == 0:
            raise BadInput(f"prompt row {request.row}: expected at least one token, found none")
        longest = max(each.num_completion_tokens for each in request.inputs)
        most = sampling.max_new_tokens if request.longest is None else request.longest
        if longest >= most:
            raise BadInput(
                f"prompt row {request.row}: a completion of {longest} tokens cannot go on, max_new_tokens is {most}"
            )
        if context is not None and length + most > context:
            raise BadInput(
                f"prompt row {request.row}: {length} prompt tokens and max_new_tokens {most} make {length + most}, "
                f"more than {whose}'s context of {context}"
            )


def require_context(
    prompts: Sequence[ModelInput], longest: int, *, context: int | None, whose: str = "the policy"
) -> None:
    """Refuse an empty prompt, and one after which a continuation of `longest` tokens does not fit."""
    for row, prompt in enumerate(prompts):
        if not len(prompt) or (context is not None and len(prompt) + longest > context):
            raise BadInput(
                f"prompt {row}: {len(prompt)} tokens and a continuation of {longest}, expected at least one token "
                f"and no more than {whose}'s context of {context}"
            )


def end_tokens(tokenizer: PreTrainedTokenizerFast, settings: GenerationConfig) -> tuple[int, ...]:
    """Return every token that ends a completion, in order: the tokenizer's EOS and those of the model's settings."""
    stated = settings.eos_token_id
    ends = {tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])} - {None}
    return tuple(sorted(ends))


def stop_window(stop: Collection[str]) -> int:
    """Return how many of the last tokens surely hold all of a stop text: each spells at least a byte."""
    # 4 more: the first tokens may be the rest of a character, which decodes as another one.
    return max(len(text.encode()) for text in stop) + 4


def texts_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Spell rows of tokens without special ones."""
    texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts


def unstopped(length: int, longest: int) -> FinishReason:
    """Say why a completion ended that nothing stopped: the length limit, or the budget."""
    return FinishReason.LENGTH if length == longest else FinishReason.CUT
