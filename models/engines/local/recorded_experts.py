"""Recorder of the experts that a mixture-of-experts model chooses for each token during decoding.

Shapes: R rows of the work, T tokens, P prompts, B live rows, L tokens of a forward pass, K experts of a token in one
layer, F experts of a token in all layers, router after router.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from rheostat.infra.errors import BadInput
from rheostat.models.engines.requests import CompletionRow
from rheostat.models.modeling.experts import ChosenExperts, record_chosen_experts, routers
from rheostat.models.records.model_input import Experts


class ExpertRecorder:
    """Recorder of the experts that a mixture of experts chooses for every token of every row, kept in host memory. If a
    completion continues from an earlier iteration, the experts of its existing tokens are recorded again in the
    prefill."""

    def __init__(self, choices: ChosenExperts, rows: Sequence[CompletionRow]) -> None:
        self._chosen = choices
        self._rows = rows
        self._prompt_experts: dict[int, Experts] = {}
        """Experts of the prefilled tokens of each row, which are the prompt and the tokens that the completion already
        had."""
        shape = (len(rows), max(row.limit for row in rows), choices.width)
        self._new_experts_RTF: Experts = np.empty(shape, choices.dtype)  # memory is allocated where it is written

    def record_prompts(self, indices: Sequence[int], prompt_B: Tensor, *, num_prompts: int) -> None:
        """Record the experts of a forward pass over `num_prompts` left-padded prompts. `prompt_B` holds, for each row
        in `indices`, the index of its prompt in the pass."""
        chosen_PTF = self._chosen.pop_choices().reshape(num_prompts, -1, self._chosen.width)
        for row, prompt in zip(indices, prompt_B.tolist(), strict=True):
            self._prompt_experts[row] = chosen_PTF[prompt, chosen_PTF.shape[1] - len(self._rows[row].input) :]

    def record_tokens(self, rows_B: Tensor, at_B: Tensor) -> None:
        """Record the experts of a forward pass over one token per row. `rows_B` holds the row numbers, and `at_B` the
        indices of the tokens in their completions."""
        self._new_experts_RTF[rows_B.cpu().numpy(), at_B.cpu().numpy()] = self._chosen.pop_choices()

    def read_row(self, row: int, num_new: int) -> Experts:
        """Return the experts of all tokens of a row to which `num_new` tokens were added. The last token is excluded,
        because it was sampled but never processed by the model."""
        begun = self._rows[row].num_existing_tokens
        return np.concatenate([self._prompt_experts[row], self._new_experts_RTF[row, begun : begun + num_new - 1]])


@contextmanager
def record_experts(model: PreTrainedModel, rows: Sequence[CompletionRow], *, policy: str) -> Iterator[ExpertRecorder]:
    """Run the block while the experts chosen for each token are recorded. Raises BadInput if the model has no experts.
    `policy` is its digest for the message."""
    if not routers(model):
        raise BadInput(
            f"update.router_replay is set, but policy {policy} has no experts whose choice could be recorded. Remove "
            "update.router_replay"
        )
    with record_chosen_experts(model) as choices:
        yield ExpertRecorder(choices, rows)
