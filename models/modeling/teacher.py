"""The teacher of on-policy distillation: it says how likely it would have been to write each token of the policy's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.config.algorithms import TeacherDirectory, TeacherEndpoint
from models.endpoints.prompt_logprobs import TokenScorer
from models.modeling.batching import AuxiliaryPass, MicroBatch
from models.modeling.directory import check_directory
from models.modeling.logprobs import TokenLogprobs
from models.modeling.policy import load_policy, policy_shape
from models.text.tokenizer import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_teacher(
    directory: Path, *, dtype: Literal["float32", "bfloat16"], temperature: float, device: torch.device
) -> TokenLogprobs:
    """Load a model of the run. In the update's precision, and over its passes, equal weights say exactly the same."""
    model = load_policy(directory, dtype=DTYPES[dtype])
    return TokenLogprobs(model, temperature=temperature).requires_grad_(False).eval().to(device)


def ask_endpoint(teacher: TeacherEndpoint, *, directory: Path, on_progress: Callable[[], None]) -> AuxiliaryPass:
    """Ask a model behind an endpoint about every sequence by itself, at temperature 1.

    `directory` holds the policy's tokenizer; `on_progress` is called after every attempt. Asking raises EndpointDown
    where there is no answer, and WorkerFailed where there is a wrong one.
    """
    scorer = TokenScorer(teacher, spell=_speller(load_tokenizer(directory)), on_progress=on_progress)

    def ask(batches: Sequence[MicroBatch]) -> list[NDArray[np.float32]]:
        asked = [[each for each in batch.inputs if len(each.written)] for batch in batches]
        scored = iter(scorer.score([each for part in asked for each in part]))
        return [np.concatenate([np.zeros(0, np.float32), *(next(scored) for _ in part)]) for part in asked]

    return ask


def check_teacher(
    teacher: TeacherDirectory | TeacherEndpoint, tokenizer: PreTrainedTokenizerFast, *, longest_tokens: int
) -> int:
    """Refuse a teacher that cannot score the policy's tokens; return its parameters here, none behind an endpoint.

    `longest_tokens` are those of prompt and completion together. Neither weights nor the network are touched.
    """
    if isinstance(teacher, TeacherEndpoint):
        TokenScorer(teacher, spell=_speller(tokenizer), on_progress=lambda: None)
        return 0
    try:
        config, own, parameters = check_directory(teacher.path)
        context = policy_shape(config, parameters=parameters, source=str(teacher.path)).context
    except BadInput as error:
        raise BadInput(f"algorithm.distillation.teacher: {error}") from error
    _check_tokens(teacher.path, own, tokenizer)
    if longest_tokens > context:
        raise BadInput(
            f"algorithm.distillation.teacher {teacher.path}: its context is {context} tokens, expected at least "
            f"{longest_tokens}: the longest prompt and max_new_tokens"
        )
    return parameters


def _check_tokens(path: Path, own: PreTrainedTokenizerFast, policy: PreTrainedTokenizerFast) -> None:
    """Every token of the policy's must be the same text under the same number; the teacher may know more."""
    theirs = own.get_vocab()
    for token, number in sorted(policy.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = f"number {theirs[token]}" if token in theirs else "no such token"
            raise BadInput(
                f"algorithm.distillation.teacher {path}: its tokenizer is not the policy's: expected token {token!r} "
                f"as number {number}, found {found}"
            )
    if own.eos_token_id != policy.eos_token_id:
        raise BadInput(
            f"algorithm.distillation.teacher {path}: it ends with {own.eos_token!r}, expected the policy's "
            f"{policy.eos_token!r}: it would teach never to end"
        )


def _speller(tokenizer: PreTrainedTokenizerFast) -> Callable[[int], str]:
    return lambda token: str(tokenizer.decode([token]))
