"""Configuration of sampling and of the engines that generate. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from infra.config import PoolsConfig, Positive, Settings
from infra.environments.find import find_environment, installed_versions
from infra.errors import BadInput
from infra.store.inputs import Program
from infra.variants import OneOf, Target, Variant
from models.config.policy import ModelShape

if TYPE_CHECKING:
    from models.config.job import Job
    from models.config.objectives import UpdateConfig


def _check_address(url: str) -> str:
    """Raise ValueError if a text is not the address of an HTTP server."""
    place = urlsplit(url)
    is_server = place.scheme in ("http", "https") and bool(place.hostname) and not (place.query or place.fragment)
    try:
        is_server = is_server and place.port != 0
    except ValueError:  # the port is no number up to 65535
        is_server = False
    if not is_server:
        raise ValueError(f"expected the address of a server, such as 'http://127.0.0.1:8000', found {url!r}")
    return url


ServerAddress = Annotated[str, AfterValidator(_check_address)]
"""Address of an HTTP server."""

BYTES: Final = {"float32": 4, "bfloat16": 2}
"""Of one number, by its precision."""

GIB: Final = 2**30


# ---- rollout
class SamplingConfig(Settings):
    """How completions are drawn."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Softmax temperature; 0 is greedy. Behaviour log-probs are those of the tempered, untruncated softmax; with vLLM,
    those that its `logprobs` names."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Candidates kept; 0 keeps all."""
    max_new_tokens: Positive = 64
    """Longest completion in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, beside EOS; the text stays in the completion."""


@dataclass(frozen=True, slots=True)
class KnownPace:
    """What an engine knows of its work before the first measurement: lengths in tokens, times in seconds."""

    median_tokens: float
    sigma: float
    base_seconds: float
    per_sequence_seconds: float
    setup_seconds: float


class EngineSettings(Variant):
    """What all engines share. `implementation` is a `models.engines.protocol.EngineMaker`.

    Whoever asks gives the name of the engine's key, for messages, and the GPUs that a worker of it has.
    """

    notes_experts: ClassVar[bool] = False
    """Whether it tells what routers chose: a `models.engines.protocol.NotesExperts`."""
    draws: ClassVar[bool] = False
    """Whether it serves policies that draw pictures, in place of those that write text."""

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield one line per combination that cannot work where the policy's completions are its own."""
        yield from ()

    def reasons_against_place(self, name: str, *, gpus: float, pools: PoolsConfig) -> Iterator[str]:
        """Yield one line per reason why its worker cannot host it, of the rollout and of a judge alike."""
        yield from ()

    def check_environment(self, name: str, *, gpus: float) -> None:
        """Raise BadInput if what it needs beside its worker is not on this machine."""

    def memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Estimate the bytes of weights and cache per worker. Raises BadInput where it cannot serve the model.

        A cache that grows with its rows is counted full. Of a server elsewhere nothing is counted, and no cache where
        that takes what a GPU has left.
        """
        return {"rollout_weights_bytes": 0, "rollout_cache_bytes": 0}

    def computes_as(self, update: "UpdateConfig") -> bool:
        """Whether its log-probs are those that the update's trainer would compute, up to rounding."""
        return False

    def known_pace(self) -> KnownPace | None:
        """What it knows of its own lengths and step times; none leaves both to be measured."""
        return None

    def libraries(self) -> dict[str, str]:
        """Versions of what it computes with in an environment of its own on this machine."""
        return {}

    def described(self, pools: PoolsConfig) -> str:
        """The engine in a line of the plan."""
        return self.known_as


class TransformersEngine(EngineSettings):
    """Generation inside the worker with a KV cache; rows that end leave the batch, and those that wait join it."""

    implementation = "models.engines.local.engine:HuggingFaceEngine"
    notes_experts = True

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and activations; resume is bit-identical in float32 on CPU."""
    max_batch_rows: Positive = 512
    """Completions decoded together."""

    def memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Count the weights and a full cache."""
        return {
            "rollout_weights_bytes": shape.parameters * BYTES[self.dtype],
            "rollout_cache_bytes": shape.cached_numbers * BYTES[self.dtype] * self.max_batch_rows * longest,
        }

    def computes_as(self, update: "UpdateConfig") -> bool:
        """It runs the trainer's own code."""
        return self.dtype == update.dtype == "float32"

    def described(self, pools: PoolsConfig) -> str:
        """Name its precision."""
        return f"{self.kind}, {self.dtype}"


CPU_CACHE_GIB = 1.0
"""Cache of a vLLM server on a CPU that names none."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM reserves room for: MaxLoRARanks in vllm/config/lora.py of vLLM 0.32."""

MOST_TEMPERATURE: Final = 2.0
"""SamplingParams in vllm/sampling_params.py of vLLM 0.32."""

CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm.v1.attention.backends.cpu_attn of vLLM 0.32; with another its engine dies at the first request."""

SEEING: Final = ("idefics3",)
"""Kinds of policies that see, by `model_type`, of which vLLM 0.32 was compared with the trainer. The image processors
of all others that we know need torchvision there, whose builds are for CUDA: on CPUs vLLM does not load them."""

INSTALL: Final = {
    "cpu": "`rheostat engine install vllm --platform cpu` makes one, give its Python as {name}.python; or set "
    "pools.gpus_per_worker",
    "cuda": "set pools.gpus_per_worker=0, or install where the NVIDIA driver is",
}


class VllmEngine(EngineSettings):
    """A vLLM server in an environment of its own that the worker starts, watches and ends; or servers that run already.

    Weights reach it as verified local files, in place, and it proves by their digest what it serves. Its batches follow
    from timing, so the same work gives the same completions only up to float rounding.
    """

    implementation = "models.engines.vllm.engine:ServedEngine"
    notes_experts = True

    kind: Literal["vllm"] = "vllm"
    python: Program | None = None
    """Python of the environment with vLLM; none takes the one that `rheostat engine install vllm` made."""
    base_urls: tuple[ServerAddress, ...] = ()
    """Servers that `rheostat engine serve vllm` started, such as `http://127.0.0.1:8000`; none starts one per worker.
    They must see the run's files under the same paths."""
    api_key_variable: str | None = None
    """Environment variable with the key of those servers; a worker's own server gets a random one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and activations."""
    logprobs: Literal["processed", "raw"] = "processed"
    """Behaviour log-probs are those after temperature, top_p and top_k, or the untempered ones; without truncation the
    first, at temperature 1 the second, are those that the trainer computes."""
    max_batch_rows: Positive = 256
    """Completions decoded together."""
    max_model_len: Positive | None = None
    """Longest sequence in tokens; none takes the policy's context."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of each GPU's memory that weights and cache may take while the server is awake."""
    cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of the KV cache; none takes what the GPU memory share leaves, and 1 GiB on a CPU."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that one server spreads a policy over."""
    prefix_caching: bool = True
    """Compute what prompts share once, such as the prompt of a group. On a CPU never with `update.router_replay`, on a
    GPU always."""
    eager: bool = False
    """Run the policy without compilation and CUDA graphs: a faster start, slower steps. On a CPU always."""
    start_seconds: Annotated[float, Field(gt=0)] = 600
    """Longest time a server may take to start, in seconds."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a server that died is started again within one piece of work."""

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Its log-probs must be those that the trainer computes, and its kernels must take the adapters."""
        yield from self._against_sampling(job.rollout.sampling)
        lora = job.update.lora
        if lora is not None and lora.rank > LORA_RANKS[-1]:
            yield (
                f"update.lora.rank {lora.rank} with rollout.engine.kind 'vllm': it serves adapters of a rank up to "
                f"{LORA_RANKS[-1]}, use that or rollout.engine.kind='transformers'"
            )
        if lora is not None and self.dtype == "float32" and job.pools.gpus_per_worker:
            yield (
                "update.lora with rollout.engine.dtype 'float32' on GPUs: vLLM's kernels for adapters take 16 bits, "
                "set rollout.engine.dtype='bfloat16'"
            )
        own = job.pools.gpus_per_worker and not self.base_urls
        if job.update.router_replay is not None and own and not self.prefix_caching:
            yield (
                "update.router_replay with rollout.engine.prefix_caching=false on GPUs: vLLM tells which experts it "
                "chose only where it caches prefixes, leave the second key out"
            )

    def _against_sampling(self, sampling: SamplingConfig) -> Iterator[str]:
        """The trainer computes log-probs at the sampling temperature over the whole vocabulary."""
        if sampling.temperature > MOST_TEMPERATURE:
            yield (
                f"rollout.sampling.temperature {sampling.temperature:g} with rollout.engine.kind 'vllm': it takes "
                f"{MOST_TEMPERATURE:g} at most, use that or rollout.engine.kind='transformers'"
            )
        truncated = sampling.top_p < 1 or sampling.top_k > 0
        if self.logprobs == "processed" and truncated:
            cut = f"top_p {sampling.top_p:g}" if sampling.top_p < 1 else f"top_k {sampling.top_k}"
            warm = "" if sampling.temperature == 1 else " and rollout.sampling.temperature=1"
            yield (
                f"rollout.sampling.{cut} with rollout.engine.logprobs 'processed': those are of the truncated softmax, "
                f"the trainer's of the whole; set rollout.engine.logprobs='raw'{warm}, or sample without truncation"
            )
        if self.logprobs == "raw" and sampling.temperature != 1:
            out = "sample at temperature 1" if truncated else "use 'processed'"
            yield (
                f"rollout.engine.logprobs 'raw' with rollout.sampling.temperature {sampling.temperature:g}: the "
                f"trainer's are tempered; {out}"
            )

    def reasons_against_place(self, name: str, *, gpus: float, pools: PoolsConfig) -> Iterator[str]:
        """A server that a worker starts has that worker's GPUs, or its share of one."""
        if self.base_urls:
            return
        if self.api_key_variable is not None:
            yield f"{name}.api_key_variable: a server that a worker starts gets a key of its own, set {name}.base_urls"
        if self.tensor_parallel > 1 and gpus < self.tensor_parallel:
            yield (
                f"{name}.tensor_parallel {self.tensor_parallel}: its worker has {gpus:g} GPUs, expected as many; set "
                f"pools.gpus_per_worker={self.tensor_parallel}, or {name}.base_urls"
            )
        sharing = min(pools.workers.max, int(1 / gpus)) if 0 < gpus < 1 else 1
        if sharing * self.gpu_memory_share > 1:
            yield (
                f"{name}.gpu_memory_share {self.gpu_memory_share:g}: {sharing} workers share a GPU at "
                f"pools.gpus_per_worker {pools.gpus_per_worker:g}, so expected at most {1 / sharing:.2g}"
            )

    def check_environment(self, name: str, *, gpus: float) -> None:
        """Refuse an environment that is not there, does not import, or was built for other workers."""
        if self.base_urls:
            return
        try:
            found = find_environment(self.kind, self.python)
        except BadInput as error:
            raise BadInput(f"{name}.kind {self.kind!r}: {error}") from error
        expected, workers = ("cuda", "workers with GPUs") if gpus else ("cpu", "workers without GPUs")
        if found.platform != expected:
            raise BadInput(
                f"{name}.kind {self.kind!r}: the environment of {found.python} is for {found.platform}, {workers} "
                f"need one for {expected}; {INSTALL[expected].format(name=name)}"
            )

    def memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Count the weights, and the cache where it is known; refuse a model that does not fit."""
        length = self.max_model_len or shape.context
        if length < longest:
            raise BadInput(
                f"{name}.max_model_len {length}: the longest prompt and completion have {longest} tokens together"
            )
        if length > shape.context:
            raise BadInput(f"{name}.max_model_len {length}: the model's context is {shape.context_text}")
        self._check_sight(shape, name)
        if self.base_urls:
            return {"rollout_weights_bytes": 0, "rollout_cache_bytes": 0}
        if not gpus and shape.head_size not in CPU_HEAD_SIZES:
            raise BadInput(
                f"{name}.kind 'vllm' on a CPU: the model's heads have {shape.head_size} numbers, expected one of "
                f"{', '.join(map(str, CPU_HEAD_SIZES))}; change its heads or hidden_size, or use "
                f"{name}.kind='transformers'"
            )
        weights: dict[str, float] = {"rollout_weights_bytes": shape.parameters * BYTES[self.dtype]}
        gib = self.cache_gib or (None if gpus else CPU_CACHE_GIB)
        if gib is None:
            return weights
        needed = shape.cached_numbers * BYTES[self.dtype] * length
        if gib * GIB < needed:
            raise BadInput(
                f"{name}.cache_gib {gib:g}: one sequence of {length} tokens takes {needed / GIB:.3g} GiB; raise it, or "
                f"lower {name}.max_model_len"
            )
        return weights | {"rollout_cache_bytes": int(gib * GIB)}

    def _check_sight(self, shape: ModelShape, name: str) -> None:
        """Refuse a model that sees of which vLLM is not known to compute what the trainer does."""
        if shape.sees and shape.sees not in SEEING:
            raise BadInput(
                f"{name}.kind 'vllm': expected a model that reads text alone, or one of {', '.join(SEEING)}; found "
                f"{shape.sees}, which vLLM does not load on a CPU and was not compared on elsewhere; use "
                f"{name}.kind='transformers'"
            )
        if shape.sees and self.logprobs == "raw":
            raise BadInput(
                f"{name}.logprobs 'raw': a model that sees never writes the tokens that stand for images, which raw "
                f"log-probs do not know; use {name}.logprobs='processed'"
            )

    def libraries(self) -> dict[str, str]:
        """Those of the environment that would serve; of servers elsewhere only their rollouts tell."""
        return {} if self.base_urls else installed_versions(self.kind, self.python)

    def described(self, pools: PoolsConfig) -> str:
        """Name where it runs, and what a server would take."""
        where = f"at {', '.join(self.base_urls)}" if self.base_urls else "a server for each worker"
        spread = f" over {self.tensor_parallel} GPUs" if self.tensor_parallel > 1 else ""
        cache = ""
        if self.cache_gib is None and pools.gpus_per_worker and not self.base_urls:
            cache = f", cache up to {self.gpu_memory_share:.0%} of the memory of each GPU"
        return f"{self.kind}, {self.dtype}, {where}{spread}, {self.logprobs} log-probs{cache}"


class DiffusersEngine(EngineSettings):
    """Pictures drawn inside the worker, with the denoiser, text encoders and VAE of a directory in diffusers format."""

    implementation = "models.engines.drawing:PictureEngine"
    draws = True

    kind: Literal["diffusers"] = "diffusers"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the denoiser; states and steps are float32 always. In bfloat16 a step's log-prob is off by as much as a clip
    of 1e-4, so set update.correction, which takes the trainer's."""
    max_batch_rows: Positive = 64
    """Pictures drawn together."""

    def memory(self, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
        """Count the denoiser's weights; a denoiser caches nothing."""
        return {"rollout_weights_bytes": shape.parameters * BYTES[self.dtype], "rollout_cache_bytes": 0}

    def computes_as(self, update: "UpdateConfig") -> bool:
        """It runs the trainer's own code."""
        return self.dtype == update.dtype == "float32"

    def described(self, pools: PoolsConfig) -> str:
        """Name its precision."""
        return f"{self.kind}, {self.dtype}"


class TargetEngine(Target):
    """An engine of your own: a subclass of `models.config.engines.EngineSettings` (see "Extending")."""


EngineConfig = Annotated[EngineSettings, OneOf((TransformersEngine, VllmEngine, DiffusersEngine, TargetEngine))]
