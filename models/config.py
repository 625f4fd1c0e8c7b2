"""Configuration of data, policy, generation, credit and update. Torch-free; defaults are the recipe we run."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from infra.config import Settings

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


# ---- data


class ArithmeticData(Settings):
    """Templated word problems made from a seed; their answers are checked by a program."""

    kind: Literal["arithmetic"] = "arithmetic"
    operations: Annotated[int, Field(ge=1, le=8)] = 4
    """Additions or subtractions per problem."""
    train_problems: Positive = 4096
    """Problems to learn from."""
    heldout_problems: Positive = 256
    """Problems kept for evaluation; a hash of the question decides which, so the two never meet."""


class FileData(Settings):
    """Problems from a JSON Lines, Parquet or Arrow file."""

    kind: Literal["file"] = "file"
    path: Path
    """Training problems: .jsonl, .parquet or .arrow."""
    heldout_path: Path | None = None
    """Evaluation problems; none keeps `heldout_fraction` of the training file back."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of problems kept for evaluation when there is no second file, chosen by a hash of the prompt."""
    prompt_column: str = "prompt"
    """Column with the prompt: plain text, or a list of chat messages with `role` and `content`."""
    answer_column: str | None = "answer"
    """Column with the reference answer; none where no reward needs one."""
    template: str = "{prompt}"
    """How plain text becomes a prompt; `{prompt}` is the column's text. Chat messages use the tokenizer's template."""
    limit: Positive | None = None
    """Read at most so many problems per file."""


DataConfig = Annotated[ArithmeticData | FileData, Field(discriminator="kind")]


# ---- policy


class ScratchPolicy(Settings):
    """A small decoder built from nothing, with a byte-level BPE trained on the data's text."""

    kind: Literal["scratch"] = "scratch"
    architecture: Literal["llama", "qwen3"] = "llama"
    """Shape of the decoder."""
    vocab_size: Annotated[int, Field(ge=300)] = 354
    """Tokens of the tokenizer, 256 bytes and the special ones included."""
    hidden_size: Annotated[int, Field(ge=8)] = 32
    """Width."""
    intermediate_size: Annotated[int, Field(ge=8)] = 96
    """Width of the MLP."""
    layers: Positive = 2
    """Decoder blocks."""
    heads: Positive = 4
    """Attention heads."""
    kv_heads: Positive = 4
    """Key-value heads."""
    context: Annotated[int, Field(ge=16)] = 256
    """Longest sequence in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchPolicy":
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self


class DirectoryPolicy(Settings):
    """Any causal language model directory in Hugging Face format."""

    kind: Literal["directory"] = "directory"
    path: Path
    """Directory with config.json, safetensors and tokenizer."""


PolicyConfig = Annotated[ScratchPolicy | DirectoryPolicy, Field(discriminator="kind")]


class WarmupConfig(Settings):
    """Supervised warm-up before the first iteration."""

    steps: Positive = 1200
    """Optimizer steps."""
    batch_size: Positive = 32
    """Sequences per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate; linear over 5% of the steps, then cosine to a tenth. Pretrained policies take 1e-5."""
    worked_fraction: Fraction = 0.3
    """Share of arithmetic examples that show the worked answer; the others show a bare guess."""


# ---- preferences


class ArithmeticPreferences(Settings):
    """Pairs made from arithmetic problems: a right completion is preferred to a wrong one."""

    kind: Literal["arithmetic"] = "arithmetic"
    train_pairs: Positive = 8192
    """Pairs to learn from."""
    heldout_pairs: Positive = 256
    """Pairs of held-out problems, for pair accuracy."""


class FilePreferences(Settings):
    """Pairs from a JSON Lines, Parquet or Arrow file."""

    kind: Literal["file"] = "file"
    path: Path
    """Training pairs."""
    heldout_path: Path | None = None
    """Evaluation pairs; none keeps `heldout_fraction` of the training file back."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for evaluation when there is no second file, chosen by a hash of the prompt."""
    prompt_column: str = "prompt"
    """Column with the prompt: plain text, or a list of chat messages with `role` and `content`."""
    chosen_column: str = "chosen"
    """Column with the better completion."""
    rejected_column: str = "rejected"
    """Column with the worse completion."""
    template: str = "{prompt}"
    """How plain text becomes a prompt; `{prompt}` is the column's text."""


PreferencesConfig = Annotated[ArithmeticPreferences | FilePreferences, Field(discriminator="kind")]


class DpoConfig(Settings):
    """Direct preference optimisation of the policy after its warm-up (DPO, arXiv 2305.18290, eq. 7)."""

    steps: Positive = 200
    """Optimizer steps."""
    batch_size: Positive = 32
    """Pairs per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate; linear over 5% of the steps, then cosine to a tenth. Pretrained policies take 5e-7."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How closely the policy is held to where it starts."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are taken to be the wrong way round (conservative DPO)."""


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


class DynamicSampling(Settings):
    """Waves of prompts until enough groups are informative (DAPO, arXiv 2503.14476): `rollout.prompts` is the target.

    A group is informative when its rewards, by the raw term `metric`, are not all equal.
    """

    metric: str | None = None
    """Reward term that is looked at; none takes the first."""
    max_extra_waves: Annotated[int, Field(ge=0, le=64)] = 3
    """Waves after the first."""
    margin: Annotated[float, Field(ge=1)] = 1.2
    """A wave has ceil(gap x EMA of issued/informative x margin) prompts."""
    on_shortfall: Literal["shrink", "fill", "fail"] = "shrink"
    """Below the target after the last wave: train on what there is, add uninformative groups of no weight, or stop."""
    surplus: Literal["return", "keep"] = "return"
    """Informative groups beyond the target: their prompts come first in the next iteration, or the groups themselves
    are trained there, one version stale."""


class PartialRollout(Settings):
    """Long completions spread over iterations: each is cut at a budget and continues first in the next iteration.

    The budget counts tokens, not seconds, so that a run repeats itself bit for bit.
    """

    tokens: Positive
    """New tokens of a completion per iteration."""
    over_dispatch: Annotated[float, Field(ge=0, le=4)] = 0.25
    """Share of prompts issued beyond the target, to stand in for groups that are cut."""
    max_staleness: Positive = 1
    """A completion begun so many versions ago is generated to its end."""


class RolloutConfig(Settings):
    """How many prompts and completions an iteration has."""

    prompts: Positive = 64
    """Prompts per iteration; with `dynamic`, the informative groups aimed at."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Completions per prompt; most algorithms reckon credit relative to their mean reward."""
    shard_prompts: Positive = 32
    """Prompts per shard: the unit of work, of commit and of loss when a worker dies."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are drawn."""
    engine: EngineConfig = TransformersEngine()
    """What generates."""
    dynamic: DynamicSampling | None = None
    """Dynamic sampling; none trains on the first wave as it is."""
    partial: PartialRollout | None = None
    """Partial rollout; none generates every completion to its end."""


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


# ---- evaluation


class EvaluationConfig(Settings):
    """Held-out evaluation before, during and after a run."""

    problems: Positive = 256
    """Held-out problems used, the first so many."""
    every: Annotated[int, Field(ge=0)] = 0
    """Iterations between evaluations; 0 evaluates only at the start and the end."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Softmax temperature; 0 is greedy."""


class RetentionConfig(Settings):
    """Which policy versions keep their files; manifests always stay."""

    keep_last: Annotated[int, Field(ge=2)] = 2
    """Newest versions kept; resuming needs them."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Every n-th version is kept for good; 0 keeps none but the first and the newest."""
