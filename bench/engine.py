"""Tokens per second of the rollout engine, compared with transformers' `generate` called for one group at a time.

The model has the demo's shape and random weights. EOS is likely enough that completions end at different lengths.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.tables import Table
from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.protocol import Request
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.seeds import derive_seed, sample_seed
from rheostat.models.records.versions import ModelVersion
from tests.support.policies import VOCABULARY, write_policy

PROMPTS, GROUP, LONGEST, ROUNDS = 32, 8, 64, 3


@dataclass(frozen=True, slots=True)
class Result:
    """Number of tokens and seconds of one round of generation with one of the compared methods."""

    name: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def requests() -> list[Request]:
    """Build 32 generation requests with prompts of 30 to 60 random tokens.

    Each request is for a group of 8 completions.
    """
    random = np.random.Generator(np.random.Philox(derive_seed("bench")))
    return [
        Request(
            row=row,
            inputs=(ModelInput.from_prompt(random.integers(2, VOCABULARY, size=int(random.integers(30, 61)))),) * GROUP,
            seeds=tuple(sample_seed(0, 0, prompt_row=row, sample=sample) for sample in range(GROUP)),
        )
        for row in range(PROMPTS)
    ]


def generate_groups(model: PreTrainedModel) -> int:
    """Generate a group of completions per prompt with transformers' `generate`. Return the number of generated tokens.

    The log-probs of the tokens are computed too, as in the rollout engine.
    """
    tokens = 0
    for request in requests():
        prompt = torch.from_numpy(request.inputs[0].tokens).long()[None]
        outputs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=0,
            num_return_sequences=GROUP,
            max_new_tokens=LONGEST,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers = outputs.sequences[:, prompt.shape[1] :]
        logprobs = torch.stack(outputs.logits, dim=1).log_softmax(dim=-1).gather(2, answers[..., None])
        ended = (answers == model.generation_config.eos_token_id).cumsum(dim=1)
        num_tokens = (ended.cumsum(dim=1) <= 1).sum()
        assert logprobs.isfinite().all()
        tokens += int(num_tokens)
    return tokens


def compare(rounds: int) -> list[Result]:
    """Generate alternately with the rollout engine and with transformers' `generate`. Return the median round of each.

    Alternating rounds ensure that other load on the machine slows down both methods.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_policy(directory)
        engine = HuggingFaceEngine(TransformersEngine())
        engine.load(directory, ModelVersion(version=0, weights=BundleRef(key="bench", digest="bench", bytes=0)))
        model = AutoModelForCausalLM.from_pretrained(name)
    work, sampling = requests(), SamplingConfig(max_new_tokens=LONGEST)

    def batched() -> int:
        return sum(len(completion.tokens) for group in engine.generate(work, sampling) for completion in group)

    ways: dict[str, Callable[[], int]] = {
        "rollout engine": batched,
        "transformers generate, by group": lambda: generate_groups(model),
    }
    results: dict[str, list[Result]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            started = time.perf_counter()
            tokens = run()
            results[way].append(Result(way, tokens, time.perf_counter() - started))
    speed = {way: statistics.median_low(result.tokens_per_second for result in results[way]) for way in ways}
    return [next(result for result in results[way] if result.tokens_per_second == speed[way]) for way in ways]


def measure() -> list[Table]:
    """Measure tokens per second of the rollout engine and of transformers' `generate`.

    Both run on one thread, as in a rollout worker.
    """
    torch.set_num_threads(1)
    ours, theirs = compare(ROUNDS)
    rows = tuple((result.name, result.tokens, result.seconds, result.tokens_per_second) for result in (ours, theirs))
    return [
        Table(
            title=f"Rollout engine on 1 thread: {PROMPTS} prompts × {GROUP}, up to {LONGEST} tokens",
            columns=("", "tokens", "seconds", "tokens/s"),
            rows=rows,
            notes=(
                f"{ours.tokens_per_second / theirs.tokens_per_second:.1f} times as fast; median of {ROUNDS} rounds",
            ),
        )
    ]
