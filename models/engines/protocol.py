"""Interface of rollout engines, which load policy weights and generate completions, and the factory that builds an
engine from its settings. This module does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from rheostat.infra.errors import BadInput
from rheostat.infra.variants import check_implementation, implementation_of
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.engines import EngineSettings, SamplingConfig
from rheostat.models.records.media import ImageSource
from rheostat.models.records.model_input import Experts, ModelInput
from rheostat.models.records.pictures import Picture
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class Request:
    """Request to a rollout engine for one or more completions of the same prompt."""

    row: int
    """Index of the prompt in its prompt shard. Error messages name this index."""
    inputs: tuple[ModelInput, ...]
    """One model input per completion: the shared prompt, followed by the tokens that a partial completion already has.
    """
    seeds: tuple[int, ...]
    """One random seed per completion. A continued completion resumes the seed's random sequence after the numbers that
    its existing tokens used."""
    budget: int | None = None
    """Number of new tokens after which a completion is cut and continues in the next iteration. None means no limit."""
    max_tokens: int | None = None
    """Maximum length of a completion in tokens, or None to use `max_new_tokens` of the sampling configuration."""
    abandoned: Event | None = field(default=None, compare=False, repr=False)
    """Event that is set when nobody needs the completions any more. An engine may then end the call with
    `concurrent.futures.CancelledError`."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in the prompt, which all completions of the request share."""
        return self.inputs[0].num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion that the policy generated for a request: its new tokens, their log-probs and the reason why it
    ended."""

    tokens: tuple[int, ...]
    """IDs of the new tokens. With finish reason `stop`, the last token is an EOS token or completes a stop text.
    """
    logprobs: tuple[float, ...]
    """Log-prob of each new token in float32, from the untruncated softmax at the sampling temperature (at temperature 1
    if sampling is greedy)."""
    text: str
    """Text of the whole completion without special tokens, including the text of tokens from earlier iterations or
    turns."""
    finish_reason: FinishReason
    experts: Experts | None = field(default=None, compare=False, repr=False)
    """Experts that a mixture of experts chose for each token of prompt and completion except the last, or None if not
    requested."""
    picture: Picture | None = None
    """Generated image, or None for text. For an image, `tokens` holds the denoising steps that are trained."""


@dataclass(frozen=True, slots=True)
class SequenceScores:
    """Log-probs of the tokens of a given sequence, and the most probable tokens at each place, at temperature 1. The
    first token of the sequence has neither."""

    logprobs: tuple[float, ...]
    """Log-prob of each token after the first one."""
    best: tuple[tuple[tuple[int, float], ...], ...]
    """Most probable tokens in the place of each token after the first one, with their log-probs, in descending
    order."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over decoding steps, from which the scheduler estimates how the duration of a step depends on the batch
    size. The difference of two such sums describes the decoding steps between them."""

    steps: int = 0
    sequences: float = 0.0
    """Sum of the batch sizes (sequences per step) over all steps."""
    sequences_squared: float = 0.0
    seconds: float = 0.0
    sequence_seconds: float = 0.0
    """Sum over all steps of batch size times duration in seconds."""

    def add(self, sequences: int, seconds: float, *, steps: int = 1) -> "StepSums":
        """Return these sums extended by `steps` steps over `sequences` sequences each, which took `seconds` in
        total."""
        return StepSums(
            steps=self.steps + steps,
            sequences=self.sequences + steps * sequences,
            sequences_squared=self.sequences_squared + steps * sequences**2,
            seconds=self.seconds + seconds,
            sequence_seconds=self.sequence_seconds + sequences * seconds,
        )

    def since(self, earlier: "StepSums") -> dict[str, float]:
        """Return the sums over the steps after `earlier`, keyed by the names under which workers report timings."""
        return {
            "steps": self.steps - earlier.steps,
            "step_sequences": self.sequences - earlier.sequences,
            "step_sequences_squared": self.sequences_squared - earlier.sequences_squared,
            "step_seconds": self.seconds - earlier.seconds,
            "step_sequence_seconds": self.sequence_seconds - earlier.sequence_seconds,
        }


class Engine(Protocol):
    """Rollout engine: generates completions with the weights that it loaded last. `progress` grows while work advances,
    so that a caller can detect a stall.

    The same weights, requests and sampling give the same completions, whatever the engine did before: bit for bit, or
    up to float rounding if the composition of the engine's batches depends on timing.
    """

    progress: int

    def producer(self) -> str:
        """Return the engine's name with the library versions and hardware that affect its results.

        Rollout shards store this text, so that differences between shards can be explained.
        """

    def load(self, directory: Path, policy: ModelVersion, *, adapter: Path | None = None) -> int:
        """Load the policy in `directory` and its adapter, if any.

        The caller must have verified the digests of the files. Returns the number of bytes of weights that were loaded.
        """

    def loaded_digest(self) -> str:
        """Return the digest of the loaded policy, or "" if none is loaded or its weights cannot be verified."""

    def sleep(self) -> None:
        """Release the memory of weights and KV cache. The weights must be loaded again before the engine's next use."""

    def close(self) -> None:
        """Stop the engine with all its processes. The engine cannot be used afterwards."""

    def step_sums(self) -> StepSums:
        """Return timing sums over all decoding steps since the engine was built."""

    def score_continuations(
        self, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """Return, for each prompt, one number per continuation: the summed log-prob of the continuation after that
        prompt, at temperature 1."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Generate completions. Returns one list per request, in order, with one completion per seed of the request."""


@runtime_checkable
class VisionEngine(Protocol):
    """Rollout engine that can generate with vision-language policies."""

    def show(self, images: ImageSource) -> None:
        """Set the source from which the engine reads the images of later prompts. Prompts name images by digest."""


@runtime_checkable
class RecordsExperts(Protocol):
    """Rollout engine that can report which experts a mixture-of-experts model chose for each token."""

    def record_experts(self, is_enabled: bool, /) -> None:
        """Set whether later completions report the experts that the routers chose for each token. Before the first
        load, this setting states whether any completion will report experts."""


@runtime_checkable
class ImageEngine(Protocol):
    """Rollout engine of text-to-image policies, which generate images instead of text."""

    def generate_images(
        self, requests: Sequence[Request], denoising: DenoisingConfig, trained_steps: range | None
    ) -> list[list[Completion]]:
        """Generate images. Returns one list per request, in order, with one image per seed.

        `trained_steps` selects denoising steps, and None selects all. A selected step is sampled with noise and trained
        if the sampler has noise at that step. All other steps are deterministic.
        """


class GeneratesCompletions(Protocol):
    """Object with the method `generate` of an engine, which is all that episodes (completions generated over several
    turns) need."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Generate completions. Returns one list per request with one completion per seed, like `Engine.generate`."""


class Generate(Protocol):
    """Function with the signature and behavior of `Engine.generate`, which generates completions for requests."""

    def __call__(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]: ...


T = TypeVar("T")


@runtime_checkable
class InterleavingEngine(GeneratesCompletions, Protocol):
    """Rollout engine that batches the concurrent calls of several threads, so that episodes need not wait for each
    other."""

    def run_interleaved(self, work: Callable[[Generate], T]) -> T:
        """Call `work` with a function that generates completions, and return the result of `work`. `work` may be called
        more than once. All completions in the returned result were generated by the policy that was loaded."""


@runtime_checkable
class StatesPlaces(Protocol):
    """Rollout engine that states how many completions it decodes at the same time."""

    @property
    def places(self) -> int:
        """Maximum number of completions that are decoded at the same time. Others wait."""


ScoreTokens = Callable[[Sequence[int], int], SequenceScores]
"""Function with the signature and behavior of `ScoresTokens.score_tokens`."""


@runtime_checkable
class ScoresTokens(Protocol):
    """Rollout engine that can compute the log-probs of the tokens of a sequence. Several threads may call it."""

    @property
    def can_score_tokens(self) -> bool:
        """Whether the log-probs of tokens can be computed with the policy that is loaded."""

    def score_tokens(self, tokens: Sequence[int], top: int, /) -> SequenceScores:
        """Return the log-probs of the tokens, and the `top` most probable tokens at each position. The sequence is
        shorter than the context of the policy."""


@runtime_checkable
class ContinuousEngine(Protocol):
    """Rollout engine that forms its batches from the requests of one call, and can also batch the concurrent calls of
    several threads."""

    def batch_continuously(self) -> InterleavingEngine:
        """Return an engine that batches concurrent calls and generates with the policy that is loaded now. Completions
        are the same up to rounding, because the batches depend on timing."""


class EngineFactory(Protocol):
    """Function or class that builds a rollout engine without weights. The engine's class usually serves as the
    factory."""

    def __call__(self, settings: Any, /, *, adapter_rank: int) -> Engine:  # noqa: ANN401 -- the engine's own settings
        """Build an engine. `adapter_rank` is the highest rank of the adapters that it will load, or 0 if it loads
        none."""
        ...


METHODS = ("producer", "load", "loaded_digest", "sleep", "close", "step_sums", "score_continuations", "generate")
"""Names of the methods that the class of a configured engine must have."""


def build_engine(config: EngineSettings, *, adapter_rank: int = 0) -> Engine:
    """Build an engine without weights. `adapter_rank` is the largest rank of the adapters that it will load, or 0."""
    return cast(EngineFactory, implementation_of(config))(config, adapter_rank=adapter_rank)


def check_implemented(config: EngineSettings, *, name: str) -> None:
    """Check that the class of a configured engine can be imported, can be built from its settings and has all methods
    of an engine. Raises BadInput, with `name` as the name of the setting, if the check fails. Engines that ship with
    Rheostat are skipped, because they are known to be complete and take seconds to import."""
    if not config.ships_with("models"):
        check_class(config, name=name)


def check_class(config: EngineSettings, *, name: str) -> None:
    """Import the class of a configured engine and check its signature and methods. Raises BadInput, with `name` as the
    name of the setting, if something is missing."""
    check_implementation(config, "settings", where=name, named=("adapter_rank",))
    engine_class = implementation_of(config)
    missing = [method for method in METHODS if not callable(getattr(engine_class, method, None))]
    if isinstance(engine_class, type) and missing:
        raise BadInput(
            f"{name} {config.label!r}: the class {config.implementation!r} must have the methods "
            f"{', '.join(METHODS)}, but {', '.join(missing)} is missing. Add the missing methods"
        )
