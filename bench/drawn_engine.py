"""Implementation of the engine of `bench.drawn`."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from bench.drawn import DrawnLengths, DrawnVllm
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.requests import CompletionRow
from rheostat.models.engines.sampling import sample_uniforms
from rheostat.models.engines.vllm.client import Stops
from rheostat.models.engines.vllm.completions import PendingRequest
from rheostat.models.engines.vllm.engine import ServedEngine
from rheostat.models.records.schemas import FinishReason


class DrawnEngine(ServedEngine):
    """vLLM engine that ends each completion at a sampled length, or at the token limit.

    EOS and stop strings are ignored.
    """

    def __init__(self, config: DrawnVllm, *, adapter_rank: int = 0) -> None:
        super().__init__(config, adapter_rank=adapter_rank)
        self._lengths = config.lengths

    def _open_drafts(self, rows: Sequence[CompletionRow], sampling: SamplingConfig) -> list[PendingRequest]:
        rows_of_batch = super()._open_drafts(rows, sampling)
        for draft in rows_of_batch:
            length = max(drawn_length(self._lengths, draft.row.seed), draft.row.num_existing_tokens + 1)
            if length <= draft.row.limit:
                draft.end, draft.at_end = length, FinishReason.STOP
        return rows_of_batch

    def _stops(self, sampling: SamplingConfig) -> Stops:
        return Stops((), (), ignore_eos=True)


def drawn_length(lengths: DrawnLengths, seed: int) -> int:
    """Sample the length of a completion in tokens from a log-normal distribution.

    The same seed gives the same length.
    """
    deviation = NormalDist().inv_cdf(float(sample_uniforms(seed, 1)[0]) + 2.0**-54)  # a uniform may be 0
    return max(1, round(lengths.median_tokens * math.exp(lengths.sigma * deviation)))
