"""Settings of the server that answers OpenAI clients with a policy. Torch-free."""

from pathlib import Path
from typing import Literal

from rheostat.infra.config import Positive, Settings
from rheostat.models.config.engines import SamplingConfig, TransformersEngine

ObservedHistory = Literal["append", "per_turn"]
"""Context of a request that continues an answer: "append" keeps the sampled tokens and appends the new messages,
"per_turn" renders the whole chat again."""


class ServerSampling(SamplingConfig):
    """Sampling settings of a server, whose answers may be longer than those of a run by default."""

    max_new_tokens: Positive = 1024
    """Maximum length of an answer in tokens."""


class PolicyServer(Settings):
    """Settings of `rheostat engine serve-policy`."""

    engine: TransformersEngine = TransformersEngine()
    """Precision and batch size of the engine."""
    sampling: ServerSampling = ServerSampling()
    """Temperature, top_p and top_k of all answers, their maximum length in tokens, and texts that end every answer."""
    parser: str = "auto"
    """Parser of tool calls: "auto", "hermes", "llama3_json", "none", or a function `pkg.mod:function`."""
    history: ObservedHistory = "append"
    """Context of a request that continues an answer: "append" keeps the sampled tokens, "per_turn" renders the whole
    chat again."""
    context: Positive = 32_768
    """Context length in tokens if the model's config.json states none."""
    seed: int | None = None
    """Random seed. With a seed, a restarted server gives the same answers to the same requests. The default is a random
    seed."""


class PolicyServerWork(Settings):
    """Request to serve a policy."""

    server: PolicyServer
    directory: Path
    """Directory of the policy in Hugging Face format."""
    port: int
    """Port of the loopback interface, or 0 for any free port."""
    key_variable: str
    """Environment variable with the API key. If it is not set, a random key is created and printed."""
