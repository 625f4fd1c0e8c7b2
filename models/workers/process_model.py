"""Scorer of the reward `process_model`, which scores every step of a completion."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pyarrow as pa
import torch

from rheostat.infra.errors import BadInput
from rheostat.infra.store.contracts import Store
from rheostat.models.config.process_models import ProcessModelReward
from rheostat.models.data.problems import NO_ARGUMENTS
from rheostat.models.modeling.process_model import TOKEN_CLASSIFIER, score_steps
from rheostat.models.modeling.reward_model import ScoredTexts, load_reward_model
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.work import JudgeWork
from rheostat.models.text.step_inputs import encode_steps
from rheostat.models.text.steps import split_steps
from rheostat.models.workers.prompt_chats import read_chats


class StepScorer:
    """Token classifier of the reward `process_model`. Implements
    `rheostat.models.workers.reward_model.CompletionScorer`."""

    columns = ("prompt", "completion")

    def __init__(self, reward: ProcessModelReward, directory: Path, device: Literal["cpu", "cuda"]) -> None:
        self._reward = reward
        dtype = getattr(torch, reward.dtype)
        self._model = load_reward_model(directory, device=device, dtype=dtype, kind=TOKEN_CLASSIFIER)

    def score(
        self, rollouts: pa.Table, store: Store, work: JudgeWork, on_pass: Callable[[int, float], None]
    ) -> tuple[list[ScoredTexts], list[int]]:
        """Return the scores of the steps of each completion, and the number of tokens that the model processed for the
        completion, which is 0 if the text exceeds the context. The model's own chat template renders chats. If the
        model has no chat template, it reads the policy's rendered prompt."""
        tokenizer = self._model.tokenizer
        rows = zip(*(rollouts[name].to_pylist() for name in ("prompt", "completion", "prompt_row")), strict=True)
        chats = None if work.prompts is None or not tokenizer.chat_template else read_chats(store, work.prompts)
        inputs: list[ModelInput] = []
        faults: dict[int, str] = {}
        for row, (prompt, completion, prompt_row) in enumerate(rows):
            messages, arguments = ((), NO_ARGUMENTS) if chats is None else chats[prompt_row]
            try:
                encoded = encode_steps(
                    tokenizer,
                    messages or prompt,
                    split_steps(completion, self._reward.steps),
                    separator=self._reward.separator,
                    source=f"prompt row {prompt_row}",
                    arguments=arguments,
                )
            except BadInput as error:
                encoded, faults[row] = ModelInput(), str(error)
            inputs.append(encoded)
        scores = score_steps(
            self._model,
            inputs,
            how=self._reward.aggregate,
            batch_tokens=self._reward.batch_tokens,
            on_pass=on_pass,
        )
        lengths = [max(0, len(each) - 1) for each in inputs]
        results = [ScoredTexts(None, faults[row]) if row in faults else scored for row, scored in enumerate(scores)]
        return results, [length if length <= self._model.context else 0 for length in lengths]
