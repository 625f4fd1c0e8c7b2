"""Configuration of sampling and of the engines that generate. Torch-free."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Positive, Settings


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


class TransformersEngine(Settings):
    """Generation inside the worker with a KV cache; finished rows leave the batch."""

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and activations; resume is bit-identical in float32 on CPU."""
    max_batch_rows: Positive = 512
    """Completions decoded together."""


class PacedEngine(Settings):
    """No model: it draws lengths from a distribution and sleeps as long as a measured engine would decode.

    For experiments with placement on machines without accelerators. Its tokens mean nothing.
    """

    kind: Literal["paced"] = "paced"
    base_seconds: Annotated[float, Field(ge=0)] = 0.002
    """Seconds of a decoding step, whatever the batch."""
    per_sequence_seconds: Annotated[float, Field(ge=0)] = 0.0001
    """Seconds that each sequence of the batch adds to a step."""
    setup_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds per sequence before its first token."""
    load_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to load weights, of which there are none."""
    median_tokens: Annotated[float, Field(gt=0)] = 64
    """Median length of the log-normal distribution at policy version 0, in tokens."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Its standard deviation in log space."""
    drift: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the median from one policy version to the next."""
    endings: tuple[str, ...] = ()
    """A completion that stops ends with one of these texts, by its seed: a judge's verdicts, such as `score: 7`."""


class DrawnLengths(Settings):
    """Lengths drawn from a log-normal distribution in place of the policy's own, for benchmarks with random weights."""

    median_tokens: Annotated[float, Field(gt=0)]
    """Median, in tokens; the mean is this times exp(sigma² / 2)."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation in log space."""


CPU_CACHE_GIB = 1.0
"""Cache of a vLLM server on a CPU that names none."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM reserves room for: MaxLoRARanks in vllm/config/lora.py of vLLM 0.32."""


class VllmEngine(Settings):
    """A vLLM server in an environment of its own that the worker starts, watches and ends; or servers that run already.

    Weights reach it as verified local files, in place, and it proves by their digest what it serves. Its batches follow
    from timing, so the same work gives the same completions only up to float rounding.
    """

    kind: Literal["vllm"] = "vllm"
    python: Path | None = None
    """Python of the environment with vLLM; none takes the one that `rheostat engine install vllm` made."""
    base_urls: tuple[str, ...] = ()
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
    """Compute what prompts share once, such as the prompt of a group."""
    eager: bool = False
    """Run the policy without compilation and CUDA graphs: a faster start, slower steps. On a CPU always."""
    start_seconds: Annotated[float, Field(gt=0)] = 600
    """Longest time a server may take to start, in seconds."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a server that died is started again within one piece of work."""
    lengths: DrawnLengths | None = None
    """For benchmarks alone: completions end at drawn lengths, whatever the policy writes."""


EngineConfig = Annotated[TransformersEngine | PacedEngine | VllmEngine, Field(discriminator="kind")]
