"""Configuration of models behind HTTP endpoints. Torch-free."""

from typing import Annotated

from pydantic import Field

from infra.config import Positive, Settings

# ---- models elsewhere
MAX_BACKOFF_SECONDS = 30.0

MAX_RETRY_AFTER_SECONDS = 60.0
"""A server that asks for more patience is down."""

MAX_PAUSE_SECONDS = MAX_RETRY_AFTER_SECONDS + MAX_BACKOFF_SECONDS
"""Longest pause between two attempts at one request."""


class Endpoint(Settings):
    """A model behind an HTTP endpoint, and how patiently it is asked."""

    base_url: str
    """Such as `https://judge.example.com/v1`; its host must be in `allowed_hosts`."""
    allowed_hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Hosts, as `host` or `host:port`, that completions may be sent to."""
    allow_private: bool = False
    """Let those hosts be loopback, link-local or private addresses."""
    model: str
    """Name of the model there."""
    api_key_variable: str | None = None
    """Environment variable that holds the key; the key itself is in no configuration, log or manifest."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 120
    """Longest time for one request."""
    retries: Annotated[int, Field(ge=0, le=20)] = 5
    """Attempts after the first on time-outs, lost connections, 408, 409, 429 and 5xx."""
    backoff_seconds: Annotated[float, Field(gt=0)] = 0.5
    """Pause before the second attempt; it doubles, with jitter, up to 30 s. Retry-After is obeyed up to 60 s."""
    concurrency: Positive = 32
    """Requests under way at once, per worker."""
