"""Estimate of the maximum memory of each update rank, computed from sizes alone. Torch-free.

All values are bytes of one rank: the memory that it holds permanently, and the memory that one micro-batch adds between
its forward and its backward pass. Libraries and fragmentation in allocators are not included.
"""

from dataclasses import dataclass
from typing import Final

from rheostat.models.config.engines import BYTES
from rheostat.models.config.objectives import HEAD_COPIES, UpdateConfig, chunk_elements_of
from rheostat.models.config.outline import ModelOutline

GRADIENT_BYTES: Final = 4
"""Bytes per gradient value. Gradients are accumulated in float32 in every precision."""
MASTER_BYTES: Final = 4
"""Bytes per value of the float32 copy of trained parameters that DeepSpeed keeps from ZeRO-1 on."""
READ_BYTES: Final = 8
"""Bytes per value of the float32 copies of parameters that a trial reads at the same time (`KEPT_TENSORS`)."""
CHECKPOINTING_BYTES: Final = 2**30
"""Size of a micro-batch's activations, in bytes, above which activation checkpointing may be turned on by default."""


@dataclass(frozen=True, slots=True)
class MicrobatchSizes:
    """Number of tokens in the largest micro-batch of an update, from which peak memory is estimated."""

    tokens: int
    """Number of tokens of the micro-batch that one rank computes, in all rows and including prompts."""

    @staticmethod
    def compute(update: UpdateConfig, *, longest: int, completions: int, ranks: int) -> "MicrobatchSizes":
        """Compute the size of the largest micro-batch if an iteration has `completions` completions of at most
        `longest` tokens each."""
        slices = update.sequence_parallel
        step = -(-completions * slices // (update.minibatches * ranks)) * longest
        return MicrobatchSizes(tokens=-(-min(max(update.microbatch_tokens, longest), step) // slices))


def resident_bytes(update: UpdateConfig, model: ModelOutline, *, ranks: int) -> dict[str, float]:
    """Return the bytes that one rank holds permanently for a model under training, by purpose, such as weights and
    optimizer state. Gradients and optimizer state cover trained parameters only. The entry `trained_parameters` is a
    number of parameters, not bytes."""
    parameters, stage = model.parameters, update.running_stage
    trained = parameters if update.lora is None else update.lora.count_trained(model)
    num_weights = parameters if update.lora is None else parameters + trained
    state = update.optimizer.state_bytes + (MASTER_BYTES if stage else 0)
    return {
        "trained_parameters": trained,
        "update_weights_bytes": num_weights * BYTES[update.dtype] // (ranks if stage >= 3 else 1),
        "update_gradient_bytes": trained * GRADIENT_BYTES // (ranks if stage >= 2 else 1),
        "update_optimizer_bytes": int(trained * state) // (ranks if stage >= 1 else 1),
    }


def microbatch_bytes(
    update: UpdateConfig, model: ModelOutline, sizes: MicrobatchSizes, *, held: float
) -> dict[str, float]:
    """Return the bytes that the largest micro-batch adds at its peak, between its forward and backward pass, by
    purpose. `held` are the bytes that the rank holds permanently.

    When a CPU rank writes the trained weights, it makes a copy after the micro-batch is freed; `update_writing_bytes`
    is the excess of this copy over the micro-batch. `recomputes` tells whether layers are recomputed in the backward
    pass. The default is to recompute if the kept activations would exceed both `held` and 1 GiB.
    """
    number = BYTES[update.dtype]
    norms = model.norm_numbers * ((update.dtype == "bfloat16") - (update.lora is not None))
    kept_by_adapters = 0 if update.lora is None else update.lora.count_kept(model) / max(model.blocks, 1)
    block = sizes.tokens * number * (model.kept_numbers + norms + kept_by_adapters)
    kept_activations, inputs = block * model.blocks, sizes.tokens * number * model.hidden_size * model.blocks
    recomputes = update.activation_checkpointing
    if recomputes is None:
        recomputes = model.recomputes and kept_activations > max(CHECKPOINTING_BYTES, held)
    activations = inputs + block * model.largest_block if recomputes else kept_activations
    activations += number * (0 if update.lora is None else update.lora.count_matrix(model))
    logits = sizes.tokens * model.vocab_size
    head = head_bytes(logits, memory=None)
    copied = number * (model.parameters if update.lora is None else update.lora.count_trained(model))
    return {
        "pass_logits": logits,
        "recomputes": float(recomputes),
        "kept_activations_bytes": kept_activations,
        "update_activations_bytes": activations,
        "update_head_bytes": head,
        "update_writing_bytes": max(0.0, copied - activations - head),
    }


def frozen_bytes(update: UpdateConfig, model: ModelOutline, *, ranks: int) -> int:
    """Return the bytes that one rank holds permanently for a model that is never trained, in the precision of
    `update`."""
    return model.parameters * BYTES[update.dtype] // (ranks if update.shards_weights else 1)


def loading_bytes(update: UpdateConfig, model: ModelOutline) -> int:
    """Return the bytes that one rank needs while it loads a model, in addition to the weights that it keeps. Gradients
    and optimizer state do not exist yet.

    To find out how the model computes, a rank reads single parameters in float32 (`rheostat.models.modeling.trials`).
    Models that cannot be loaded directly are loaded as a whole in float32 first.
    """
    number, is_whole = BYTES[update.dtype], loads_whole(update, model)
    reads_copies = (update.shards_weights and not is_whole) or update.dtype != "float32"
    read = model.largest_parameter * (number + READ_BYTES) if reads_copies else 0
    cast = 0 if update.shards_weights else number  # the cast replaces the float32 weights one by one
    return read + (model.parameters * (BYTES["float32"] - cast) if is_whole else 0)


def loads_whole(update: UpdateConfig, model: ModelOutline) -> bool:
    """Return whether a model is loaded as a whole in float32, although its weights are kept in another way."""
    return not model.loads_directly and (update.shards_weights or update.dtype != "float32")


def peak_bytes(
    update: UpdateConfig, model: ModelOutline, sizes: MicrobatchSizes, *, ranks: int, has_reference: bool
) -> dict[str, float]:
    """Return the bytes of one rank for training a policy, by purpose: what it holds permanently, what the largest
    micro-batch adds, and what is needed in addition while a model is loaded (`loading_policy_bytes`).

    With `has_reference`, each rank also holds a reference model, unless adapters are trained.
    """
    held = resident_bytes(update, model, ranks=ranks)
    together = sum(value for name, value in held.items() if name.endswith("_bytes"))
    reference = frozen_model_bytes(update.for_reference, model, name="reference", ranks=ranks)
    return {
        **held,
        **(reference if has_reference and update.lora is None else {}),
        **microbatch_bytes(update, model, sizes, held=together),
        **_describe_loading(update, model, name="policy"),
    }


def critic_bytes(update: UpdateConfig, critic: ModelOutline, *, ranks: int) -> dict[str, float]:
    """Return the bytes of one rank for a critic, by purpose: what it holds permanently, and what is needed in addition
    while the critic is loaded."""
    held = resident_bytes(update, critic, ranks=ranks)
    parts = {
        f"update_critic_{part}_bytes": held[f"update_{part}_bytes"] for part in ("weights", "gradient", "optimizer")
    }
    return parts | _describe_loading(update, critic, name="critic")


def frozen_model_bytes(update: UpdateConfig, model: ModelOutline, *, name: str, ranks: int) -> dict[str, float]:
    """Return the bytes of one rank for a model that is never trained: what it holds permanently, and what is needed in
    addition while the model is loaded. `name` is "reference" or "teacher"."""
    size = frozen_bytes(update, model, ranks=ranks)
    return {f"update_{name}_bytes": size, **_describe_loading(update, model, name=name)}


def _describe_loading(update: UpdateConfig, model: ModelOutline, *, name: str) -> dict[str, float]:
    whole = {f"{name}_loads_whole": 1.0} if loads_whole(update, model) else {}
    return {f"loading_{name}_bytes": loading_bytes(update, model), **whole}


def head_bytes(logits: float, *, memory: float | None) -> float:
    """Return the bytes that computing `logits` logits in the output head needs. `memory` is the size of the GPU's
    memory in bytes, or None on a CPU."""
    return HEAD_COPIES * 4 * min(chunk_elements_of(memory), logits)
