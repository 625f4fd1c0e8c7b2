"""Worker that scores with a discriminative reward model, and writes one shard of verdicts for each rollout shard."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, cast

import pyarrow as pa
import torch

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import find_target
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.models.config.judges import ModelReward
from rheostat.models.config.served_models import HostedModelReward
from rheostat.models.data.problems import NO_ARGUMENTS, Message
from rheostat.models.engines.device import choose_device
from rheostat.models.engines.protocol import StepSums
from rheostat.models.modeling.reward_model import ScoredTexts, load_reward_model, score
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import VERDICT_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome, order_statistics
from rheostat.models.records.work import JudgeWork
from rheostat.models.text.sequences import encode
from rheostat.models.workers.prompt_chats import read_chats

logger = logging.getLogger(__name__)

PLACES = ("prompt_row", "sample")


class CompletionScorer(Protocol):
    """Loaded model that scores completions. The worker creates it with the reward's settings, the model's directory and
    the device."""

    columns: tuple[str, ...]
    """Columns of a rollout shard that the model reads."""

    def score(
        self, rollouts: pa.Table, store: Store, work: JudgeWork, on_pass: Callable[[int, float], None]
    ) -> tuple[list[ScoredTexts], list[int]]:
        """Return the score of each completion, and the number of tokens or pictures that the model read for it (0 if it
        was not scored). `on_pass` is called after each forward pass with its rows and its duration in seconds."""
        ...


class TextScorer:
    """Sequence classifier of the reward `model`, which scores texts. Implements `CompletionScorer`."""

    columns = ("prompt", "completion")

    def __init__(self, reward: ModelReward, directory: Path, device: Literal["cpu", "cuda"]) -> None:
        self._reward = reward
        self._model = load_reward_model(directory, device=device, dtype=getattr(torch, reward.dtype))

    def score(
        self, rollouts: pa.Table, store: Store, work: JudgeWork, on_pass: Callable[[int, float], None]
    ) -> tuple[list[ScoredTexts], list[int]]:
        """Return the score of each completion, and the number of tokens that were processed for it (0 if a text exceeds
        the context)."""
        texts = zip(rollouts["prompt"].to_pylist(), rollouts["completion"].to_pylist(), strict=True)
        chats = None if work.prompts is None else read_chats(store, work.prompts)
        prompt_rows = rollouts["prompt_row"].to_pylist()
        inputs: list[ModelInput] = []
        faults: dict[int, str] = {}
        for row, (prompt, completion) in enumerate(texts):
            try:
                encoded = encode(
                    self._model.tokenizer,
                    self._reward.template,
                    prompt=prompt,
                    completion=completion,
                    messages=() if chats is None else chats[prompt_rows[row]][0] or (Message("user", prompt),),
                    arguments=NO_ARGUMENTS if chats is None else chats[prompt_rows[row]][1],
                )
            except ValueError as error:
                encoded, faults[row] = ModelInput(), str(error)
            inputs.append(encoded)
        scores = score(self._model, inputs, batch_tokens=self._reward.batch_tokens, on_pass=on_pass)
        lengths = [len(each) if len(each) <= self._model.context else 0 for each in inputs]
        results = [ScoredTexts(None, faults[row]) if row in faults else scored for row, scored in enumerate(scores)]
        return results, lengths


class RewardModelWorker:
    """Worker that scores completions with a discriminative reward model. Each work unit names the model's version, and
    weights are verified before use. The same work gives the same shard, byte for byte, in any process with the same
    number of threads."""

    def __init__(self, store_uri: str, run: str, term: str, reward: HostedModelReward, threads: int) -> None:
        torch.set_num_threads(threads)
        self._device = choose_device()
        self._store = run_store(store_uri, run)
        self._term = term
        self._reward = reward
        self._model: CompletionScorer | None = None
        self._loaded = ""
        self._progress = 0
        self._steps = StepSums()

    def progress(self) -> int:
        """Return the number of forward passes and model loads so far. If the number stops growing, the worker is
        stuck."""
        return self._progress

    def take(self, policy: ModelVersion) -> str:
        """Load version `policy` of the reward model unless it is loaded, and return the digest of its weights."""
        if self._loaded != policy.weights.digest:
            self.sleep()  # the old weights are freed before the new ones are loaded
            directory = fetch_bundle(self._store, policy.weights)
            build = cast(
                Callable[..., CompletionScorer],
                find_target(self._reward.scorer, where=f"reward model {self._term}"),
            )
            self._model = build(self._reward, directory, self._device)
            self._loaded = policy.weights.digest
            self._progress += 1
            logger.info("reward model %s: loaded %s", self._term, self._loaded)
        return self._loaded

    def sleep(self) -> None:
        """Release the memory of the reward model, so that another worker can use the GPU. The next work unit loads the
        model again."""
        self._model, self._loaded = None, ""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def judge(self, work: JudgeWork) -> Outcome:
        """Score every completion of a rollout shard with the reward model, and write the scores in the same order as
        one shard. Raises BadInput if the work unit names no model."""
        clock = time.perf_counter
        started = clock()
        if work.model is None:
            raise BadInput(f"reward model {self._term}: the work unit does not name the reward model's weights")
        self.take(work.model)
        loaded, before = clock(), self._steps
        assert self._model is not None, "take() loads the model"
        rollouts = read_shard(self._store, work.rollouts, (*PLACES, *self._model.columns))
        scores, tokens_read = self._model.score(rollouts, self._store, work, self._passed)
        finished_scoring = clock()
        metadata = {"iteration": str(work.iteration), "rollouts": work.rollouts.digest, "term": self._term}
        ref = write_shard(self._store, _table(rollouts, scores), kind="verdicts", metadata=metadata)
        passed = sum(1 for tokens in tokens_read if tokens)
        return Outcome(
            shards=(ref,),
            metrics=_metrics(scores, passed=passed, tokens_read=sum(tokens_read)),
            # A score counts as one step, like an answer of one token. The scheduler estimates times from this count.
            detail={"lengths": order_statistics([1] * passed)},
            timings={
                "load": loaded - started,
                "generate": finished_scoring - loaded,
                "write": clock() - finished_scoring,
            }
            | self._steps.since(before),
        )

    def _passed(self, sequences: int, seconds: float) -> None:
        self._progress += 1
        self._steps = self._steps.add(sequences, seconds)


def _table(rollouts: pa.Table, scores: list[ScoredTexts]) -> pa.Table:
    count = len(scores)
    columns = {
        "prompt_row": rollouts["prompt_row"],
        "sample": rollouts["sample"],
        "vote": [0] * count,
        "attempt": [0] * count,
        "text": [None] * count,
        "value": [scored.value for scored in scores],
        "steps": [None] * count,
        "step_values": [scored.steps for scored in scores],
        "error": [scored.error for scored in scores],
        "tokens": [0] * count,
    }
    return pa.table(columns, schema=VERDICT_SCHEMA)


def _metrics(scores: list[ScoredTexts], *, passed: int, tokens_read: int) -> dict[str, float]:
    return {
        "sequences": float(passed),
        "tokens": float(passed),
        "tokens_read": float(tokens_read),
        "answers": float(len(scores)),
        "invalid": float(sum(scored.value is None for scored in scores)),
    }
