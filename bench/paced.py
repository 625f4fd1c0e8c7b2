"""Settings of an engine without a model, for experiments with placement on machines without accelerators."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from infra.config import PoolsConfig
from models.config.engines import EngineSettings, KnownPace
from models.config.job import Job


class PacedEngine(EngineSettings):
    """Engine that samples lengths from a distribution and sleeps as long as a measured engine would decode."""

    implementation = "bench.paced_engine:Paced"

    base_seconds: Annotated[float, Field(ge=0)] = 0.002
    """Seconds of a decoding step, independent of the batch."""
    per_sequence_seconds: Annotated[float, Field(ge=0)] = 0.0001
    """Seconds that each sequence of the batch adds to a step."""
    setup_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds per sequence before its first token."""
    load_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait instead of loading weights."""
    median_tokens: Annotated[float, Field(gt=0)] = 64
    """Median, in tokens, of the log-normal distribution of lengths at policy version 0."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the lengths in log space."""
    drift: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the median from one policy version to the next."""
    endings: tuple[str, ...] = ()
    """Texts with which a completion that stops can end, chosen by its seed, such as a judge's verdict `score: 7`."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield the conflicts with a job: tokens are sampled without a model, so a teacher cannot use them."""
        if job.algorithm.distillation is not None:
            yield "algorithm.distillation: a paced engine has no model, so a teacher cannot score its tokens"

    def known_pace(self) -> KnownPace:
        """Return the engine's pace, which the settings determine completely."""
        return KnownPace(
            median_tokens=self.median_tokens,
            sigma=self.sigma,
            base_seconds=self.base_seconds,
            per_sequence_seconds=self.per_sequence_seconds,
            setup_seconds=self.setup_seconds,
        )

    def describe(self, pools: PoolsConfig) -> str:
        """Return a description which states that nothing is computed."""
        return "paced: sleeps instead of computing, for experiments; the texts are random"
