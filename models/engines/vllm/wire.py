"""What goes between an engine and a vLLM server, as records. Both ends stand in this repository and change together."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, TypeAdapter


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion that is wanted of a server."""

    id: int
    tokens: tuple[int, ...]
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion beside its length."""

    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    ignore_eos: bool = False


class Answer(BaseModel):
    """A JSON object that a server answers."""

    model_config = ConfigDict(frozen=True)


class About(Answer):
    """What a server is; none of it changes while it runs."""

    vllm: str
    torch: str
    transformers: str
    python: str
    platform: Literal["cpu", "cuda"]
    device: str
    dtype: str
    logprobs: Literal["processed", "raw"]
    max_model_len: int
    tensor_parallel: int
    lora_rank: int
    sleeps: bool


class Loaded(Answer):
    """What a load came to."""

    digest: str
    bytes: int
    seconds: float


class Chunk(Answer):
    """The next tokens of a completion, and after the last why it ended."""

    id: int
    tokens: Base64Bytes
    logprobs: Base64Bytes
    finish: Literal["stop", "length", "abort"] | None


class Refused(Answer):
    """What went wrong in the middle: with a digest, the server does not vouch for a completion."""

    error: str
    digest: str | None = None


class Done(Answer):
    """The end of an answer: sums over the decoding steps of the server since it started."""

    done: Literal[True]
    steps: int
    sequences: float
    sequences_squared: float
    seconds: float
    sequence_seconds: float


class Proof(Answer):
    """What is served, empty where it is nothing or cannot be proven."""

    digest: str


class Slept(Answer):
    """Whether memory was given back."""

    slept: bool


class Likelihoods(Done):
    """Summed log-probs, prompts x continuations, row by row, and the same counts."""

    logprobs: Base64Bytes


class Error(Answer):
    """Why a request was refused, and what is served where another digest was asked for."""

    error: str = ""
    digest: str = ""


LINES: Final = TypeAdapter(Annotated[Chunk | Done | Refused, Field(union_mode="left_to_right")])
