"""Settings of an engine without a model, for experiments with placement on machines without accelerators."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rheostat.infra.config import PoolsConfig
from rheostat.models.config.engines import EngineSettings, KnownPace
from rheostat.models.config.job import Job


class PacedEngine(EngineSettings):
    """Settings of an engine that generates random text without a model, and sleeps as long as a real engine would take.

    Completion lengths are sampled from a log-normal distribution.
    """

    implementation = "bench.paced_engine:Paced"

    base_seconds: Annotated[float, Field(ge=0)] = 0.002
    """Seconds of each decoding step, regardless of the number of sequences in the batch."""
    per_sequence_seconds: Annotated[float, Field(ge=0)] = 0.0001
    """Seconds that each sequence in the batch adds to a decoding step."""
    setup_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that each sequence of a batch takes before the first token is generated, like a prefill."""
    load_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the engine sleeps when it loads a policy. Weights are not read."""
    median_tokens: Annotated[float, Field(gt=0)] = 64
    """Median, in tokens, of the log-normal distribution of completion lengths at policy version 0."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the logarithm of the completion lengths."""
    drift: Annotated[float, Field(gt=0)] = 1.0
    """Factor by which the median completion length grows from one policy version to the next."""
    endings: tuple[str, ...] = ()
    """Texts that a completion can end with, such as a judge's verdict `score: 7`. The completion's seed selects one.

    Completions that reach the token limit have no ending.
    """

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if the job uses distillation.

        A teacher cannot score tokens that were sampled without a model.
        """
        if job.algorithm.distillation is not None:
            yield "algorithm.distillation: a paced engine has no model, so a teacher cannot score its tokens"

    def known_pace(self) -> KnownPace:
        """Return the engine's speed and completion lengths, which are known from the settings."""
        return KnownPace(
            median_tokens=self.median_tokens,
            sigma=self.sigma,
            base_seconds=self.base_seconds,
            per_sequence_seconds=self.per_sequence_seconds,
            setup_seconds=self.setup_seconds,
        )

    def describe(self, pools: PoolsConfig) -> str:
        """Return a description for users, which states that the engine sleeps instead of computing."""
        return "paced: sleeps instead of computing, for experiments; the texts are random"
