"""Configuration of models behind HTTP endpoints. Torch-free."""

from typing import Annotated

from pydantic import Field

from rheostat.infra.config import Positive, Settings

# ---- models elsewhere
MAX_BACKOFF_SECONDS = 30.0

MAX_RETRY_AFTER_SECONDS = 60.0
"""Maximum accepted Retry-After header in seconds. A server that requests a longer pause is treated as unavailable."""

MAX_PAUSE_SECONDS = MAX_RETRY_AFTER_SECONDS + MAX_BACKOFF_SECONDS
"""Maximum pause in seconds between two attempts of the same request."""


class Endpoint(Settings):
    """Fields common to models that are reached through an HTTP endpoint: address, credentials, retries and
    concurrency."""

    base_url: str
    """Base URL of the API, such as `https://judge.example.com/v1`. Its host must be listed in `allowed_hosts`."""
    allowed_hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Hosts to which prompts and completions may be sent, as `host` or `host:port`."""
    allow_private: bool = False
    """Whether the hosts in `allowed_hosts` may have loopback, link-local or private IP addresses."""
    model: str
    """Name of the model, as the endpoint expects it in requests."""
    api_key_variable: str | None = None
    """Environment variable that contains the API key. The key itself is never stored in a configuration, log or
    manifest."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 120
    """Time limit in seconds for each attempt of a request."""
    retries: Annotated[int, Field(ge=0, le=20)] = 5
    """Maximum number of retries of a request after a timeout, a lost connection or status 408, 409, 429 or 5xx."""
    backoff_seconds: Annotated[float, Field(gt=0)] = 0.5
    """Pause in seconds before the first retry. The pause doubles with every retry, with jitter, up to 30 s. If the
    server sends a Retry-After header of up to 60 s, its pause is used instead."""
    concurrency: Positive = 32
    """Maximum number of requests that a worker has open at the same time."""
