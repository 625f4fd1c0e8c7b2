"""Configuration of sampling, and of the inference engines that generate completions. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from rheostat.infra.config import PoolsConfig, Positive, Settings
from rheostat.infra.environments.find import find_environment, installed_versions
from rheostat.infra.errors import BadInput
from rheostat.infra.pools.gpu_layout import GpuLayout
from rheostat.infra.store.inputs import Program
from rheostat.infra.variants import OneOf, Target, Variant
from rheostat.models.config.job import Job, SamplingFacts, UpdateFacts
from rheostat.models.config.policy import ModelShape
from rheostat.models.config.vllm_limits import (
    CPU_CACHE_GIB,
    CPU_HEAD_SIZES,
    LORA_RANKS,
    MAX_TEMPERATURE,
    check_longrope,
    check_vision_support,
)


def _check_address(url: str) -> str:
    """Return a URL unchanged. Raises ValueError if it is not the address of an HTTP server."""
    place = urlsplit(url)
    is_server = place.scheme in ("http", "https") and bool(place.hostname) and not (place.query or place.fragment)
    try:
        is_server = is_server and place.port != 0
    except ValueError:  # the port is no number up to 65535
        is_server = False
    if not is_server:
        raise ValueError(f"the address of a server must look like 'http://127.0.0.1:8000', found {url!r}")
    return url


ServerAddress = Annotated[str, AfterValidator(_check_address)]
"""Address of an HTTP server, such as `http://127.0.0.1:8000`."""

BYTES: Final = {"float32": 4, "bfloat16": 2}
"""Number of bytes of one weight or activation, by precision."""

GIB: Final = 2**30


# ---- rollout
class SamplingConfig(Settings):
    """Settings for sampling text from a language model."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Softmax temperature; 0 is greedy decoding. The log-probs recorded for training include the temperature but no
    truncation by top_p or top_k; with vLLM, the engine's `logprobs` setting decides."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: only the most likely tokens with this total probability are sampled. 1 uses all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most likely tokens from which the next token is sampled; 0 uses all tokens."""
    max_new_tokens: Positive = 64
    """Maximum length of a completion in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, in addition to the EOS token. The text is kept at the end of the completion."""


@dataclass(frozen=True, slots=True)
class KnownPace:
    """Generation speed of an engine that is known in advance, used until it is measured. Lengths are in tokens."""

    median_tokens: float
    sigma: float
    base_seconds: float
    per_sequence_seconds: float
    setup_seconds: float


class EngineSettings(Variant):
    """Fields common to all inference engines. `implementation` names a
    `rheostat.models.engines.protocol.EngineFactory`.

    In the methods, `name` is the configuration key of the engine (for messages) and `gpus` the number of GPUs of each
    of its workers.
    """

    checks = {
        "policy": "rheostat.models.inspection.engines:check_engine",
        "machine": "rheostat.models.inspection.engines:check_environment",
    }
    records_experts: ClassVar[bool] = False
    """Whether the engine can report the experts that a mixture-of-experts policy chose for each token (`RecordsExperts`
    in `rheostat.models.engines.protocol`)."""
    interleaves_episodes: ClassVar[bool] = False
    """Whether each episode of an environment can continue independently of the others (`InterleavingEngine` and
    `ContinuousEngine` in `rheostat.models.engines.protocol`)."""
    scores_tokens: ClassVar[bool] = False
    """Whether the engine can compute the log-probs of given tokens for agents and evaluation suites (`ScoresTokens` in
    `rheostat.models.engines.protocol`)."""
    generates_images: ClassVar[bool] = False
    """Whether the engine generates images with text-to-image policies. Such an engine cannot generate text."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job that does not work if this engine generates the completions."""
        yield from ()

    def find_placement_conflicts(self, name: str, *, gpus: float, pools: PoolsConfig) -> Iterator[str]:
        """Yield one message for each reason why a worker with `gpus` GPUs cannot run this engine."""
        yield from ()

    def reserved_memory_share(self) -> float:
        """Return the share of a GPU's memory that a worker takes while it is awake. Return 0 if the worker takes only
        the memory that its model needs."""
        return 0.0

    def check_environment(self, name: str, *, gpus: float) -> None:
        """Raise BadInput if the engine needs a separate Python environment and this is not installed correctly."""

    def estimate_memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Estimate the bytes of weights and KV cache per worker. Raises BadInput if the engine cannot serve the model.

        A cache that grows with the number of rows is counted at its maximum size. Servers that already run elsewhere
        count as 0 bytes. A cache that uses the remaining GPU memory is not counted.
        """
        return {"rollout_weights_bytes": 0, "rollout_cache_bytes": 0}

    def check_policy(self, shape: ModelShape, name: str) -> None:
        """Raise BadInput if the engine's log-probs of a policy of this shape would differ from the trainer's."""

    def matches_trainer(self, update: UpdateFacts) -> bool:
        """Return whether the engine's log-probs equal those of a trainer with the settings `update`, up to rounding."""
        return False

    def known_pace(self) -> KnownPace | None:
        """Return the engine's generation speed if it is known in advance, or None if it has to be measured."""
        return None

    def find_library_versions(self) -> dict[str, str]:
        """Return the library versions in the engine's own Python environment on this machine. Empty if it has none."""
        return {}

    def describe(self, pools: PoolsConfig) -> str:
        """Return a short description of the engine, which `rheostat plan` prints."""
        return self.label


class TransformersEngine(EngineSettings):
    """Generation with the transformers library inside the worker. Waiting completions replace finished ones in the
    batch."""

    implementation = "rheostat.models.engines.local.engine:HuggingFaceEngine"
    records_experts = True
    interleaves_episodes = True
    scores_tokens = True

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations. With float32 on a CPU, a resumed run gives bit-identical results."""
    max_batch_rows: Positive = 512
    """Maximum number of completions that are decoded at the same time."""

    def estimate_memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Estimate the bytes of the weights and of a full KV cache. Raises BadInput if the engine cannot decode the
        model."""
        shape.check_decoding(name)
        return {
            "rollout_weights_bytes": shape.parameters * BYTES[self.dtype],
            "rollout_cache_bytes": shape.cached_numbers * BYTES[self.dtype] * self.max_batch_rows * longest,
        }

    def matches_trainer(self, update: UpdateFacts) -> bool:
        """Return whether engine and trainer both use float32. In this case they run the same code."""
        return self.dtype == update.dtype == "float32"

    def describe(self, pools: PoolsConfig) -> str:
        """Return the engine's kind and precision."""
        return f"{self.kind}, {self.dtype}"


INSTALL: Final = {
    "cpu": "Run `rheostat engine install vllm --platform cpu` and set {name}.python to its Python, or set "
    "pools.gpus_per_worker",
    "cuda": "Set pools.gpus_per_worker = 0, or install vLLM on a machine with an NVIDIA driver",
}


class VllmEngine(EngineSettings):
    """Generation with vLLM servers in a separate Python environment. Each worker starts, monitors and stops its own
    server, or uses servers that already run.

    After each update the server loads the new weights from verified local files without a restart, and reports the
    digest of its weights. Batches depend on timing, so repeated work gives equal completions only up to rounding.
    """

    implementation = "rheostat.models.engines.vllm.engine:ServedEngine"
    records_experts = True
    interleaves_episodes = True
    scores_tokens = True

    kind: Literal["vllm"] = "vllm"
    python: Program | None = None
    """Python interpreter with vLLM. The default is the one that `rheostat engine install vllm` installed."""
    base_urls: tuple[ServerAddress, ...] = ()
    """URLs of running servers, started by `rheostat engine serve vllm`, such as `http://127.0.0.1:8000`. If empty, each
    worker starts its own server. The servers must be able to read the run's files under the same paths."""
    api_key_variable: str | None = None
    """Environment variable with the API key of the servers in `base_urls`. Other servers get a random key."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations."""
    logprobs: Literal["processed", "raw"] = "processed"
    """Log-probs to record for training: "processed" after temperature, top_p and top_k, or "raw" before them. The
    trainer's log-probs match "processed" if there is no truncation, and "raw" at temperature 1."""
    max_batch_rows: Positive = 256
    """Maximum number of completions that are decoded at the same time."""
    max_model_len: Positive | None = None
    """Maximum length of prompt and completion together, in tokens. The default is the policy's context length."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of each GPU's memory that weights and KV cache may use while the server is awake (not in sleep mode)."""
    cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of the KV cache in GiB. The default is what the weights leave of the GPU memory share, or 1 GiB on a CPU."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of GPUs over which one server splits the policy (tensor parallelism)."""
    prefix_caching: bool = True
    """Whether common prefixes, such as the prompt of a group, are computed only once. With `update.router_replay` it is
    always off on a CPU and must be on with GPUs."""
    eager: bool = False
    """Whether to run without compilation and CUDA graphs: faster start, slower generation. Always true on a CPU."""
    start_seconds: Annotated[float, Field(gt=0)] = 600
    """Time limit in seconds for the start of a server."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum number of times that a crashed server is restarted during one request to its worker."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting that vLLM does not support, or with which its log-probs differ from the
        trainer's."""
        yield from self._find_sampling_conflicts(job.rollout.sampling)
        lora = job.update.lora
        if lora is not None and lora.rank > LORA_RANKS[-1]:
            yield (
                f"update.lora.rank is {lora.rank}, but vLLM serves adapters up to rank {LORA_RANKS[-1]}. Lower it, or "
                "set rollout.engine.kind = 'transformers'"
            )
        if lora is not None and lora.dora:
            yield (
                "update.lora.dora cannot be combined with rollout.engine.kind = 'vllm', because vLLM does not serve "
                "DoRA adapters. Remove update.lora.dora, or set rollout.engine.kind = 'transformers'"
            )
        if lora is not None and self.dtype == "float32" and job.pools.gpus_per_worker:
            yield (
                "update.lora needs 16-bit numbers in vLLM on GPUs, but rollout.engine.dtype is 'float32'. Set "
                "rollout.engine.dtype = 'bfloat16'"
            )
        starts_gpu_server = job.pools.gpus_per_worker and not self.base_urls
        if job.update.router_replay is not None and starts_gpu_server and not self.prefix_caching:
            yield (
                "update.router_replay cannot be combined with rollout.engine.prefix_caching = false on GPUs, because "
                "vLLM reports the chosen experts only with prefix caching. Remove rollout.engine.prefix_caching"
            )

    def _find_sampling_conflicts(self, sampling: SamplingFacts) -> Iterator[str]:
        """Yield one message for each sampling setting that vLLM rejects, or with which its log-probs differ from the
        trainer's.

        The trainer computes log-probs at the sampling temperature over the whole vocabulary.
        """
        if sampling.temperature > MAX_TEMPERATURE:
            yield (
                f"rollout.sampling.temperature is {sampling.temperature:g}, but vLLM allows at most "
                f"{MAX_TEMPERATURE:g}. Lower it, or set rollout.engine.kind = 'transformers'"
            )
        truncated = sampling.top_p < 1 or sampling.top_k > 0
        if self.logprobs == "processed" and truncated:
            truncation = f"top_p = {sampling.top_p:g}" if sampling.top_p < 1 else f"top_k = {sampling.top_k}"
            hint = "" if sampling.temperature == 1 else " and rollout.sampling.temperature = 1"
            yield (
                f"rollout.sampling.{truncation} cannot be combined with rollout.engine.logprobs = 'processed', because "
                "vLLM would record log-probs of the truncated softmax and the trainer computes them over the whole "
                f"vocabulary. Set rollout.engine.logprobs = 'raw'{hint}, or sample without truncation"
            )
        if self.logprobs == "raw" and sampling.temperature != 1:
            remedy = "Sample at temperature 1" if truncated else "Use 'processed'"
            yield (
                f"rollout.engine.logprobs = 'raw' ignores the temperature, but rollout.sampling.temperature is "
                f"{sampling.temperature:g} and the trainer applies it. {remedy}"
            )

    def find_placement_conflicts(self, name: str, *, gpus: float, pools: PoolsConfig) -> Iterator[str]:
        """Yield one message for each reason why a worker with `gpus` GPUs cannot start a server with these settings."""
        if self.base_urls:
            return
        if self.api_key_variable is not None:
            yield (
                f"{name}.api_key_variable applies only to servers that already run. Remove it, or set {name}.base_urls"
            )
        if self.tensor_parallel > 1 and gpus < self.tensor_parallel:
            yield (
                f"{name}.tensor_parallel is {self.tensor_parallel}, but each worker has {gpus:g} "
                f"GPU{'s' * (gpus != 1)}. Set pools.gpus_per_worker = {self.tensor_parallel}, or {name}.base_urls"
            )
        slots = GpuLayout.of(pools, ranks_per_node=1).max_slots_per_gpu(pools.workers.max)
        sharing = max(1, int(slots * pools.gpus_per_worker / gpus)) if 0 < gpus < 1 else 1
        if sharing * self.gpu_memory_share > 1:
            yield (
                f"{name}.gpu_memory_share is {self.gpu_memory_share:g}, but {sharing} workers share a GPU, because "
                f"pools.gpus_per_worker is {pools.gpus_per_worker:g}. Set it to at most {1 / sharing:.2g}"
            )

    def reserved_memory_share(self) -> float:
        """Return the GPU memory share, unless the size of the cache is set or the servers run elsewhere."""
        return 0.0 if self.base_urls or self.cache_gib is not None else self.gpu_memory_share

    def check_environment(self, name: str, *, gpus: float) -> None:
        """Raise BadInput if vLLM's environment is missing, cannot be imported, or was built for other hardware (GPU or
        CPU)."""
        if self.base_urls:
            return
        try:
            environment = find_environment(self.kind, self.python)
        except BadInput as error:
            raise BadInput(f"{name}.kind = {self.kind!r}: {error}") from error
        platform, workers = ("cuda", "workers with GPUs") if gpus else ("cpu", "workers without GPUs")
        if environment.platform != platform:
            raise BadInput(
                f"{name}.kind = {self.kind!r}: {workers} need an environment for {platform}, but the environment of "
                f"{environment.python} is for {environment.platform}. {INSTALL[platform].format(name=name)}"
            )

    def estimate_memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Estimate the bytes of the weights and, if its size is known, of the KV cache. Raises BadInput if vLLM cannot
        serve the model."""
        length = self.max_model_len or shape.context
        if length < longest:
            raise BadInput(
                f"{name}.max_model_len is {length}, but the longest prompt and completion have {longest} tokens "
                "together. Raise it"
            )
        if length > shape.context:
            raise BadInput(
                f"{name}.max_model_len is {length}, but the model's context is only {shape.context_text}. Lower it"
            )
        check_vision_support(shape, name, logprobs=self.logprobs)
        if self.base_urls:
            return {"rollout_weights_bytes": 0, "rollout_cache_bytes": 0}
        if not gpus and shape.head_size not in CPU_HEAD_SIZES:
            raise BadInput(
                f"{name}.kind = 'vllm' supports attention heads of size {', '.join(map(str, CPU_HEAD_SIZES))} on a "
                f"CPU, but the model's heads have size {shape.head_size}. Change heads or hidden_size of the model, or "
                f"set {name}.kind = 'transformers'"
            )
        weights: dict[str, float] = {"rollout_weights_bytes": shape.parameters * BYTES[self.dtype]}
        gib = self.cache_gib or (None if gpus else CPU_CACHE_GIB)
        if gib is None:
            return weights
        needed = shape.cached_numbers * BYTES[self.dtype] * length
        if gib * GIB < needed:
            raise BadInput(
                f"{name}.cache_gib is {gib:g}, but one sequence of {length} tokens needs {needed / GIB:.3g} GiB. Raise "
                f"it, or lower {name}.max_model_len"
            )
        return weights | {"rollout_cache_bytes": int(gib * GIB)}

    def check_policy(self, shape: ModelShape, name: str) -> None:
        """Raise BadInput for longrope models that vLLM and the trainer scale differently."""
        check_longrope(shape, name)

    def find_library_versions(self) -> dict[str, str]:
        """Return the versions in the local vLLM environment. Empty with `base_urls`, whose servers report their
        versions."""
        return {} if self.base_urls else installed_versions(self.kind, self.python)

    def describe(self, pools: PoolsConfig) -> str:
        """Return the server's location, precision, log-probs and memory use, as one line for `rheostat plan`."""
        where = f"at {', '.join(self.base_urls)}" if self.base_urls else "a server for each worker"
        spread = f" over {self.tensor_parallel} GPUs" if self.tensor_parallel > 1 else ""
        cache = ""
        if self.cache_gib is None and pools.gpus_per_worker and not self.base_urls:
            cache = f", cache up to {self.gpu_memory_share:.0%} of the memory of each GPU"
        return f"{self.kind}, {self.dtype}, {where}{spread}, {self.logprobs} log-probs{cache}"


class DiffusersEngine(EngineSettings):
    """Generation of pictures inside the worker, with the denoiser, text encoders and VAE of a model in diffusers
    format."""

    implementation = "rheostat.models.engines.image_generation:DiffusersImageEngine"
    generates_images = True

    kind: Literal["diffusers"] = "diffusers"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the denoiser. The noisy latents are always float32. In bfloat16 the rounding error of a step's
    log-prob is as large as a clip range of 1e-4, so set update.correction, which uses the trainer's log-probs."""
    max_batch_rows: Positive = 64
    """Maximum number of pictures that are generated at the same time."""

    def estimate_memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Estimate the bytes of the denoiser's weights. The size of the KV cache is 0, because a denoiser has none."""
        return {"rollout_weights_bytes": shape.parameters * BYTES[self.dtype], "rollout_cache_bytes": 0}

    def matches_trainer(self, update: UpdateFacts) -> bool:
        """Return whether engine and trainer both use float32. In this case they run the same code."""
        return self.dtype == update.dtype == "float32"

    def describe(self, pools: PoolsConfig) -> str:
        """Return the engine's kind and precision."""
        return f"{self.kind}, {self.dtype}"


class TargetEngine(Target):
    """User-defined engine: a subclass of `rheostat.models.config.engines.EngineSettings` (see "Extending" in the
    documentation)."""


EngineConfig = Annotated[EngineSettings, OneOf((TransformersEngine, VllmEngine, DiffusersEngine, TargetEngine))]
