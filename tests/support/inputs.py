"""Inputs of models from plain lists of token ids."""

from collections.abc import Sequence
from dataclasses import replace

from rheostat.models.engines.protocol import Request
from rheostat.models.records.model_input import ModelInput


def request_completions(row: int, prompt: Sequence[int], seeds: Sequence[int], *, budget: int | None = None) -> Request:
    """Request one completion per seed."""
    return Request(row=row, inputs=(ModelInput.from_prompt(prompt),) * len(seeds), seeds=tuple(seeds), budget=budget)


def request_continuations(asked: Request, prefixes: Sequence[Sequence[int]], *, budget: int | None = None) -> Request:
    """Request continuations of the first tokens of each completion."""
    prompt = ModelInput.from_prompt(asked.inputs[0].prompt)
    return replace(asked, inputs=tuple(prompt.append_completion(prefix) for prefix in prefixes), budget=budget)
