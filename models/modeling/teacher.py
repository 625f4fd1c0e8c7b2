"""The teacher of on-policy distillation: it says how likely it would have been to write each token of the policy's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from models.config.teachers import TeacherEndpoint
from models.endpoints.prompt_logprobs import TokenScorer
from models.modeling.batching import AuxiliaryPass, MicroBatch
from models.modeling.logprobs import TokenLogprobs
from models.modeling.policy import load_policy
from models.text.tokenizer import load_tokenizer, speller

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
    scorer = TokenScorer(teacher, spell=speller(load_tokenizer(directory)), on_progress=on_progress)

    def ask(batches: Sequence[MicroBatch]) -> list[NDArray[np.float32]]:
        asked = [[each for each in batch.inputs if len(each.written)] for batch in batches]
        scored = iter(scorer.score([each for part in asked for each in part]))
        return [np.concatenate([np.zeros(0, np.float32), *(next(scored) for _ in part)]) for part in asked]

    return ask
