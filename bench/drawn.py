"""vLLM engine whose completions end at sampled lengths, for benchmarks with random weights."""

from typing import Annotated

from pydantic import Field

from infra.config import Settings
from models.config.engines import VllmEngine


class DrawnLengths(Settings):
    """Log-normal distribution of completion lengths, which replace the policy's own."""

    median_tokens: Annotated[float, Field(gt=0)]
    """Median length in tokens. The mean is this times exp(sigma² / 2)."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation in log space."""


class DrawnVllm(VllmEngine):
    """Settings of a vLLM server whose completions end at sampled lengths."""

    implementation = "bench.drawn_engine:DrawnEngine"

    lengths: DrawnLengths
    """Distribution of the lengths at which completions end."""
