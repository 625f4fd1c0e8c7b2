"""Engine without a model, for experiments with placement.
It takes the time of a real engine, and its tokens are meaningless.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Final

from transformers import PreTrainedTokenizerFast

from bench.paced import PacedEngine
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.protocol import Completion, Request, StepSums
from rheostat.models.engines.requests import CompletionRow, build_rows, decode_texts, length_finish_reason
from rheostat.models.engines.sampling import sample_uniforms
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.tokenizer import load_tokenizer

LONGEST_SLEEP: Final = 0.5  # seconds between two increments of `progress`, which show the pools that a worker is alive


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens from which completions are assembled, and the median completion length, for one policy version."""

    tokenizer: PreTrainedTokenizerFast
    tokens: tuple[int, ...]
    """Tokens that fill a completion before its ending.

    None of them occurs in an ending, and each is a whole character, so that any sequence can be decoded.
    """
    endings: tuple[tuple[int, ...], ...]
    """Token sequences that a completion can end with. Each includes EOS, and a completion uses one of them."""
    median_tokens: float
    digest: str
    """Digest of the policy whose tokenizer is used."""


class Paced:
    """Generation engine that sleeps instead of computing, at a configured speed.

    It sleeps `setup_seconds` per sequence, then `base_seconds + per_sequence_seconds * live sequences` per token. All
    sequences of a call form one batch, and a sequence leaves the batch when it ends. Lengths and tokens depend on the
    completion's seed and the policy's version, not on the other sequences.
    """

    def __init__(self, config: PacedEngine, *, adapter_rank: int = 0) -> None:
        self.progress = 0
        self._config = config
        self._vocabulary: _Vocabulary | None = None
        self._steps = StepSums()
        self._due = 0.0  # planned end of the work so far: the next sleep makes up for one that was too long

    def producer(self) -> str:
        return "paced"

    def load(self, directory: Path, policy: ModelVersion, *, adapter: Path | None = None) -> int:
        """Load the tokenizer of a policy, and sleep for the configured loading time. The weights are not read.

        Returns 0, the number of loaded bytes.
        """
        self._due = time.perf_counter()
        self._pause(self._config.load_seconds)
        tokenizer = load_tokenizer(directory)
        endings = tokenizer(list(self._config.endings or ("",)), add_special_tokens=False)["input_ids"]
        spoken = {*tokenizer.all_special_ids, *(token for tokens in endings for token in tokens)}
        plain = [token for token in range(len(tokenizer)) if token not in spoken]
        texts = tokenizer.batch_decode([[token] for token in plain])
        self._vocabulary = _Vocabulary(
            tokenizer=tokenizer,
            tokens=tuple(
                token for token, text in zip(plain, texts, strict=True) if "\N{REPLACEMENT CHARACTER}" not in text
            ),
            endings=tuple((*tokens, tokenizer.eos_token_id) for tokens in endings),
            median_tokens=self._config.median_tokens * self._config.drift**policy.version,
            digest=policy.digest,
        )
        return 0

    def loaded_digest(self) -> str:
        return "" if self._vocabulary is None else self._vocabulary.digest

    def sleep(self) -> None:
        self._vocabulary = None

    def close(self) -> None:
        self.sleep()

    def step_sums(self) -> StepSums:
        return self._steps

    def score_continuations(
        self, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """Return the same log-prob for every continuation, without a model.

        Sleeps for the time of one decoding step with one sequence per prompt. Returns a tuple per prompt with one
        log-prob per continuation.
        """
        self._due = time.perf_counter()
        self._run(1, sequences=len(prompts))
        return [(-math.log(len(continuations)),) * len(continuations) for _ in prompts]

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        rows = build_rows(requests, longest=sampling.max_new_tokens)
        completions = [self._completion(row, sampling.max_new_tokens) for row in rows]
        self._decode(sorted(len(completion.tokens) for completion in completions))
        remaining = iter(completions)
        return [[next(remaining) for _ in request.seeds] for request in requests]

    def _completion(self, row: CompletionRow, longest: int) -> Completion:
        """Sample the length, ending and tokens of one completion from its seed.

        `longest` is the limit of new tokens in the sampling settings.
        """
        vocabulary = self._vocabulary
        assert vocabulary is not None, "the engine must be loaded before it generates"
        draws = sample_uniforms(row.seed, row.limit + 2)
        deviation = NormalDist().inv_cdf(float(draws[0]) + 2.0**-54)  # a uniform may be 0
        ending = vocabulary.endings[int(draws[1] * len(vocabulary.endings))]
        drawn = round(vocabulary.median_tokens * math.exp(self._config.sigma * deviation))
        length = max(drawn, len(ending), row.num_existing_tokens + 1)
        filler = [vocabulary.tokens[int(draw * len(vocabulary.tokens))] for draw in draws[2:]]
        whole = (*filler[: max(0, length - len(ending))], *ending)
        tokens = whole[row.num_existing_tokens : min(length, row.limit)]
        [text] = decode_texts(vocabulary.tokenizer, [[*row.input.completion.tolist(), *tokens]])
        logprob = -math.log(len(vocabulary.tokens))
        finish_reason = FinishReason.STOP if length <= row.limit else length_finish_reason(row.limit, longest)
        return Completion(tokens, (logprob,) * len(tokens), text, finish_reason)

    def _decode(self, lengths: Sequence[int]) -> None:
        """Sleep as long as decoding one batch of sequences takes.

        `lengths` contains their numbers of tokens, in ascending order.
        """
        self._due = time.perf_counter()
        self._pause(self._config.setup_seconds * len(lengths))
        done = 0
        for index, length in enumerate(lengths):
            if length > done:
                self._run(length - done, sequences=len(lengths) - index)
                done = length

    def _run(self, steps: int, *, sequences: int) -> None:
        began = time.perf_counter()
        self._pause(steps * (self._config.base_seconds + self._config.per_sequence_seconds * sequences))
        self._steps = self._steps.add(sequences, time.perf_counter() - began, steps=steps)

    def _pause(self, seconds: float) -> None:
        self._due += seconds
        while (remaining := self._due - time.perf_counter()) > 0:
            time.sleep(min(remaining, LONGEST_SLEEP))
            self.progress += 1
        self.progress += 1
