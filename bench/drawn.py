"""vLLM engine whose completions end at sampled lengths, for benchmarks with random weights."""

from typing import Annotated

from pydantic import Field

from rheostat.infra.config import Settings
from rheostat.models.config.engines import VllmEngine


class DrawnLengths(Settings):
    """Log-normal distribution from which completion lengths are sampled. The policy does not choose them."""

    median_tokens: Annotated[float, Field(gt=0)]
    """Median of the completion lengths in tokens. The mean is this median times exp(sigma² / 2)."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the logarithm of the completion lengths."""


class DrawnVllm(VllmEngine):
    """Settings of a vLLM engine that ends each completion at a length sampled from a distribution."""

    implementation = "bench.drawn_engine:DrawnEngine"

    lengths: DrawnLengths
    """Distribution from which the length of each completion is sampled."""
