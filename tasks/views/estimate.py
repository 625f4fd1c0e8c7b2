"""Estimate of the time and memory that an iteration needs on accelerators that this machine does not have. The time is
a lower bound (roofline estimate)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.validation_errors import nearest
from rheostat.models.config.engines import BYTES
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.inspection.memory import head_bytes
from rheostat.placement.roofline import ACCELERATORS, Accelerator, Device, Generated, Limit, compute_limit, shared_flops
from rheostat.tasks.config.gpus import freed_parts, library_bytes
from rheostat.tasks.config.run import RunConfig

LOADED_MODELS: Final = ("policy", "critic", "reference", "teacher")
"""Models that an update rank loads."""
BUILT_AFTER_LOADING: Final = {
    "policy": ("gradient", "optimizer"),
    "critic": ("critic_gradient", "critic_optimizer"),
}
"""Parts of a rank's memory that do not exist yet when a model has just been loaded."""
NOT_COUNTED: Final = "Kernel launches, padding, weight transfers, judges, a critic and environments are not counted"


@dataclass(frozen=True, slots=True)
class CheckedDecoder:
    """Sizes of a language model (parameters, layers, widths), as measured by the preflight check. Implements the
    interface `rheostat.placement.roofline.DecoderWork`."""

    facts: Mapping[str, float]

    @property
    def parameters(self) -> int:
        return int(self.facts["parameters"])

    @property
    def matmul_parameters(self) -> int:
        return int(self.facts["matmul_parameters"])

    @property
    def layers(self) -> int:
        return int(self.facts["layers"])

    @property
    def query_width(self) -> int:
        return int(self.facts["query_width"])

    @property
    def kv_values_per_token(self) -> int:
        return int(self.facts["kv_values_per_token"])


class StageEstimate(Settings):
    """Estimated time of one stage of an iteration."""

    stage: str
    seconds: float
    """Lower bound of the stage's time in seconds."""
    tokens: int
    """Number of tokens that the stage processes."""

    @property
    def row(self) -> dict[str, str]:
        """Table row of the stage for `rheostat plan`, by column heading."""
        rate = f"{self.tokens / self.seconds:,.0f}" if self.seconds else "–"
        return {"stage": self.stage, "seconds": f"{self.seconds:,.3g}", "tokens": f"{self.tokens:,}", "tokens/s": rate}


class MemoryEstimate(Settings):
    """Memory that one worker needs on its accelerator."""

    role: str
    gigabytes: float
    """Gigabytes for weights, cache, gradients, optimizer state, the largest micro-batch, and `libraries`."""
    of: float
    """Memory of the accelerator in gigabytes."""
    offloaded: float = 0
    """Gigabytes that are offloaded to the memory of the machine."""
    is_loading: bool = False
    """Whether the worker needs the most memory while it loads the model."""
    libraries: float = 0
    """Gigabytes for CUDA, NCCL and DeepSpeed, or 0 if they are not counted."""

    @property
    def text(self) -> str:
        """Sentence that states the needed and the available memory."""
        warning = "" if self.gigabytes < self.of else "; this does not fit"
        offload_note = f", and {self.offloaded:,.3g} GB of machine memory" if self.offloaded else ""
        moment = "while it loads the model, " if self.is_loading else ""
        libraries = f"with {self.libraries:,.2g} GB for" if self.libraries else "without"
        needed = f"{self.gigabytes:,.3g} GB of {self.of:,.0f} GB ({moment}{libraries} libraries)"
        return f"{self.role} worker: {needed}{offload_note}{warning}"


class DeviceEstimate(Settings):
    """Estimated time and memory of an iteration on accelerators of one kind. The times assume that the accelerators run
    at full speed."""

    device: str
    rollout_devices: int
    update_devices: int
    completion_tokens: int
    """Assumed number of tokens of each completion."""
    stages: tuple[StageEstimate, ...]
    memory: tuple[MemoryEstimate, ...]
    conflicts: tuple[str, ...] = ()
    """Sentences about inference servers that leave too little memory for an update rank on the same GPU."""

    @property
    def rows(self) -> list[dict[str, str]]:
        """Table of the stages for `rheostat plan`, one row per stage."""
        return [stage.row for stage in self.stages]


def accelerator(name: str) -> Accelerator:
    """Return the accelerator that `--device` names, with its speed and memory. Raises BadInput with the known names if
    the name is unknown."""
    known = {each.key: each for each in ACCELERATORS}
    if name.lower() not in known:
        raise BadInput(f"--device {name!r} must be one of {', '.join(known)}{nearest(name.lower(), [*known])}")
    return known[name.lower()]


def estimate(
    config: RunConfig, facts: Mapping[str, float], kind: Accelerator, *, completion_tokens: int
) -> DeviceEstimate:
    """Estimate the time and memory of one iteration if every completion has `completion_tokens` tokens. Each worker and
    each update rank uses one device of this kind."""
    rollout, update, pools = config.rollout, config.update, config.pools
    decoder, prompt = CheckedDecoder(facts), round(facts["mean_prompt_tokens"])
    generated_work = Generated(
        prompts=(prompt,) * rollout.prompts, lengths=((completion_tokens,) * rollout.group_size,) * rollout.prompts
    )
    minibatches = min(update.minibatches, rollout.prompts)

    def limit(dtype: str, workers: int) -> Limit:
        flops = kind.bfloat16 if dtype == "bfloat16" else kind.float32
        device = Device(flops=flops, bandwidth=kind.bandwidth, workers=workers)
        return compute_limit(generated_work, decoder, device, bytes_per_weight=BYTES[dtype], steps=minibatches)

    generated = limit(getattr(rollout.engine, "dtype", update.dtype), pools.workers.max)
    trained = limit(update.dtype, pools.update_ranks)
    one_pass = trained.train / 3
    # a backward pass costs two forward passes; with adapters only the half for activations is needed
    backward = 1.0 if update.lora is None else 0.5
    other_passes = one_pass * (update.kl_penalty is not None) + _teacher_seconds(
        config, facts, decoder, generated_work, one_pass
    )
    stages = {
        "prefill": (generated.prefill, sum(generated_work.prompts)),
        "decode": (generated.decode, generated_work.tokens),
        "log-probs before the update": (
            one_pass if update.masks_outliers or update.masks_low_entropy else trained.logprobs,
            generated_work.trained_tokens,
        ),
        "log-probs of reference and teacher": (other_passes, generated_work.trained_tokens),
        "forward and backward": (
            update.epochs * one_pass * (1 + 2 * backward),
            update.epochs * generated_work.trained_tokens,
        ),
        "optimizer": (
            update.epochs * trained.optimizer * facts["trained_parameters"] / decoder.parameters,
            update.epochs * generated_work.trained_tokens,
        ),
    }
    nonzero_stages = {name: each for name, each in stages.items() if each[0]}
    stage_estimates = [
        StageEstimate(stage=name, seconds=seconds, tokens=tokens) for name, (seconds, tokens) in nonzero_stages.items()
    ]
    iteration_estimate = StageEstimate(
        stage="iteration", seconds=sum(stage.seconds for stage in stage_estimates), tokens=generated_work.tokens
    )
    return DeviceEstimate(
        device=f"{kind.name}: {kind.bfloat16 / 1e12:,.0f} TFLOP/s in bfloat16, {kind.float32 / 1e12:,.0f} in float32, "
        f"{kind.bandwidth / 1e12:.2f} TB/s, {kind.memory / 1e9:,.0f} GB",
        rollout_devices=pools.workers.max,
        update_devices=pools.update_ranks,
        completion_tokens=completion_tokens,
        stages=(*stage_estimates, iteration_estimate),
        memory=(_estimate_memory("rollout", facts, kind), _estimate_update_memory(config, facts, kind)),
    )


def _teacher_seconds(
    config: RunConfig, facts: Mapping[str, float], decoder: CheckedDecoder, generated_work: Generated, one_pass: float
) -> float:
    """Return the seconds of a teacher's forward pass, scaled from the policy's time by the number of parameters. Every
    rank has a copy of the teacher."""
    if config.algorithm.distillation is None or "teacher_parameters" not in facts:
        return 0.0
    arithmetic = 2 * facts["teacher_parameters"] * generated_work.trained_tokens
    return one_pass * arithmetic / shared_flops(decoder, generated_work)


def peak_memory_by_part(facts: Mapping[str, float], role: str) -> dict[str, float]:
    """Return the peak memory of a worker of `role` in bytes, by purpose, such as weights or activations."""
    return {
        name.removeprefix(f"{role}_").removesuffix("_bytes"): value
        for name, value in facts.items()
        if name.startswith(f"{role}_") and name.endswith("_bytes")
    }


def loading_excess(parts: Mapping[str, float], facts: Mapping[str, float], update: UpdateConfig) -> float:
    """Return the bytes by which the peak of an update rank while it loads a model exceeds its later peak, which is the
    sum of `parts`. Return 0 if the later peak is higher.

    Models may be loaded in any order, so each model is assumed to be the last one.
    """
    freed = freed_parts(update)
    kept = sum(size for part, size in parts.items() if part not in freed)
    peaks = [
        kept - sum(parts.get(part, 0.0) for part in BUILT_AFTER_LOADING.get(model, ())) + facts[name]
        for model in LOADED_MODELS
        if (name := f"loading_{model}_bytes") in facts
    ]
    return max(0.0, max(peaks, default=0.0) - sum(parts.values()))


def list_loading_notes(config: RunConfig, facts: Mapping[str, float]) -> Iterator[str]:
    """Yield a note for each model that is loaded as a whole in float32 before it is cast or sharded."""
    reason = "update.zero_stage is 3" if config.update.shards_weights else f"update.dtype is {config.update.dtype!r}"
    for model in LOADED_MODELS:
        if f"{model}_loads_whole" in facts:
            yield (
                f"{reason}, but each update rank loads the whole {model} in float32 first. Its weights are stored in a "
                "quantized format, or its class in transformers reads weights in an unusual way. The estimate of "
                "memory includes this."
            )


def _estimate_memory(role: str, facts: Mapping[str, float], kind: Accelerator) -> MemoryEstimate:
    return MemoryEstimate(
        role=role, gigabytes=sum(peak_memory_by_part(facts, role).values()) / 1e9, of=kind.memory / 1e9
    )


def _estimate_update_memory(config: RunConfig, facts: Mapping[str, float], kind: Accelerator) -> MemoryEstimate:
    """Return the memory that one update rank needs. Offloaded parts are counted as memory of the machine. The chunks in
    which logits are computed grow with the accelerator's memory."""
    update = config.update
    libraries = library_bytes(update, facts, ranks=config.pools.update_ranks, on_gpu=True)
    parts = peak_memory_by_part({**facts, **libraries}, "update") | {
        "head": head_bytes(facts["pass_logits"], memory=kind.memory)
    }
    parts.pop("writing", None)  # the copy that is being written to the store is in the machine's memory
    offloaded_bytes = sum(parts.pop(part, 0.0) for part in update.offloaded)
    loading_bytes = loading_excess(parts, facts, update)
    return MemoryEstimate(
        role="update",
        gigabytes=(sum(parts.values()) + loading_bytes) / 1e9,
        of=kind.memory / 1e9,
        offloaded=offloaded_bytes / 1e9,
        libraries=sum(libraries.values()) / 1e9,
        is_loading=loading_bytes > 0,
    )
