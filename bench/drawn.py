"""vLLM whose completions end at drawn lengths, whatever the policy writes: for benchmarks with random weights."""

from typing import Annotated

from pydantic import Field

from infra.config import Settings
from models.config.engines import VllmEngine


class DrawnLengths(Settings):
    """Lengths drawn from a log-normal distribution in place of the policy's own."""

    median_tokens: Annotated[float, Field(gt=0)]
    """Median, in tokens; the mean is this times exp(sigma² / 2)."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation in log space."""


class DrawnVllm(VllmEngine):
    """A vLLM server, and lengths in place of ends."""

    implementation = "bench.drawn_engine:DrawnEngine"

    lengths: DrawnLengths
    """Where completions end."""
