"""What every rollout engine is: weights in, completions out; and how one is made of its settings. Torch-free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from infra.errors import BadInput
from infra.variants import check_implementation, implementation_of
from models.config.denoising import DenoisingConfig
from models.config.engines import EngineSettings, SamplingConfig
from models.records.media import ImageSource
from models.records.model_input import Experts, ModelInput
from models.records.pictures import Picture
from models.records.schemas import FinishReason
from models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class Request:
    """Completions that are wanted of one prompt."""

    row: int
    """Row of the prompt in its shard; names the prompt in messages."""
    inputs: tuple[ModelInput, ...]
    """One of each completion: the prompt, which all share, and what the completion already has, where it goes on."""
    seeds: tuple[int, ...]
    """One of each completion; draws go on after those of what it already has."""
    budget: int | None = None
    """New tokens after which a completion is cut for now; none lets each come to its end."""
    longest: int | None = None
    """Tokens of a completion at which it ends for good, where that is less than the sampling allows."""

    @property
    def num_prompt_tokens(self) -> int:
        """Count the tokens of the prompt."""
        return self.inputs[0].num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy answered: its new tokens, how likely each was, and why it ended."""

    tokens: tuple[int, ...]
    """Ends with an EOS token, or with the token that completed a stop text, when the reason is `stop`."""
    logprobs: tuple[float, ...]
    """float32 values, one per token: log-softmax at the sampling temperature (at 1 when greedy), untruncated."""
    text: str
    """Text of the whole completion without special tokens, of what it already had too."""
    finish_reason: FinishReason
    experts: Experts | None = field(default=None, compare=False, repr=False)
    """What routers chose for each token of prompt and completion but the last; none where nobody asked for it."""
    picture: Picture | None = None
    """What it drew; its tokens are then the denoising steps that are learnt."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sufficient statistics of step time on batch size: differences of two readings describe what lies between."""

    steps: int = 0
    sequences: float = 0.0
    """Sum of the batch sizes."""
    sequences_squared: float = 0.0
    seconds: float = 0.0
    sequence_seconds: float = 0.0
    """Sum of batch size x step time."""

    def plus(self, sequences: int, seconds: float, *, steps: int = 1) -> "StepSums":
        """Add steps over a batch of so many sequences, which took so long together."""
        return StepSums(
            steps=self.steps + steps,
            sequences=self.sequences + steps * sequences,
            sequences_squared=self.sequences_squared + steps * sequences**2,
            seconds=self.seconds + seconds,
            sequence_seconds=self.sequence_seconds + sequences * seconds,
        )

    def since(self, earlier: "StepSums") -> dict[str, float]:
        """Name what came after an earlier reading, as a unit of work reports it among its timings."""
        return {
            "steps": self.steps - earlier.steps,
            "step_sequences": self.sequences - earlier.sequences,
            "step_sequences_squared": self.sequences_squared - earlier.sequences_squared,
            "step_seconds": self.seconds - earlier.seconds,
            "step_sequence_seconds": self.sequence_seconds - earlier.sequence_seconds,
        }


class Engine(Protocol):
    """Generates with the weights it loaded last.

    `progress` moves while work advances. The same weights, requests and sampling give the same completions, whatever
    the engine did before: bit for bit, or up to float rounding where its batches follow from timing.
    """

    progress: int

    def producer(self) -> str:
        """Name the engine and what else its numbers depend on; shards keep it."""

    def load(self, directory: Path, policy: ModelVersion, *, adapter: Path | None = None) -> int:
        """Take the policy in `directory`, and its adapter, whose files were verified to be those of its digest.

        Returns the bytes that were moved.
        """

    def serves(self) -> str:
        """Return the digest of the policy that would generate now, empty where none would or it cannot be proven."""

    def sleep(self) -> None:
        """Give the memory of weights and cache back; who wants to use the engine again loads it again."""

    def close(self) -> None:
        """End whatever runs for the engine, for good."""

    def steps(self) -> StepSums:
        """Sums over all decoding steps so far, from which their time is regressed on the batch."""

    def likelihoods(
        self, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """Return for each prompt the log-probability of each continuation after it, at temperature 1."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Return one list per request, with one completion per seed, in order."""


@runtime_checkable
class SeeingEngine(Protocol):
    """An engine of policies that see."""

    def show(self, images: ImageSource) -> None:
        """Say where the images of the prompts that follow are."""


@runtime_checkable
class NotesExperts(Protocol):
    """An engine that can tell what the routers of a mixture of experts chose."""

    def note_experts(self, wanted: bool, /) -> None:
        """Say whether the completions that follow are to tell; before the first weights, whether any will."""


@runtime_checkable
class DrawingEngine(Protocol):
    """An engine of policies that draw pictures, in place of writing text."""

    def draw(
        self, requests: Sequence[Request], denoising: DenoisingConfig, learnt: range | None
    ) -> list[list[Completion]]:
        """Return one list per request, with one picture per seed, in order.

        Of the steps in `learnt`, those that have noise are noisy and learnt, all others deterministic; none is all.
        """


class WritesCompletions(Protocol):
    """All of an engine that episodes need."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """As `Engine.generate`."""


class Generate(Protocol):
    """`Engine.generate`."""

    def __call__(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]: ...


T = TypeVar("T")


@runtime_checkable
class InterleavingEngine(Protocol):
    """An engine that several threads may ask, and that batches requests as they come: episodes need no rounds."""

    def interleaved(self, work: Callable[[Generate], T]) -> T:
        """Do work that generates with what it is given, perhaps more than once; return what it returned.

        All that it generated was written by the policy that was loaded.
        """


class EngineMaker(Protocol):
    """Makes an engine without weights: its class, mostly."""

    def __call__(self, settings: Any, /, *, adapter_rank: int) -> Engine:  # noqa: ANN401 -- the engine's own settings
        """`adapter_rank` is the largest of the adapters that it will load, 0 where it loads none."""
        ...


METHODS = ("producer", "load", "serves", "sleep", "close", "steps", "likelihoods", "generate")
"""What an engine must be able to do."""


def build_engine(config: EngineSettings, *, adapter_rank: int = 0) -> Engine:
    """Make an engine without weights; `adapter_rank` is the largest of the adapters that it will load."""
    return cast(EngineMaker, implementation_of(config))(config, adapter_rank=adapter_rank)


def check_implemented(config: EngineSettings, *, name: str) -> None:
    """Raise BadInput unless the engine's class can be imported, made, and asked for all that engines do.

    Of our own that is known, and importing them takes seconds.
    """
    if not config.ships_with("models"):
        check_class(config, name=name)


def check_class(config: EngineSettings, *, name: str) -> None:
    """Import the engine's class and check it."""
    check_implementation(config, "settings", where=name, named=("adapter_rank",))
    found = implementation_of(config)
    lacking = [method for method in METHODS if not callable(getattr(found, method, None))]
    if isinstance(found, type) and lacking:
        raise BadInput(
            f"{name} {config.known_as!r}: expected {config.implementation!r} to have {', '.join(METHODS)}, "
            f"found no {', '.join(lacking)}"
        )
