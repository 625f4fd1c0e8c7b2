"""What each rank of the update holds at most, foretold from sizes alone. Torch-free.

Bytes of one rank: what it holds all the time, and what one pass adds between its forward and its backward pass.
Libraries, and what allocators leave between blocks, are not counted.
"""

from dataclasses import dataclass
from typing import Final

from models.config.engines import BYTES
from models.config.objectives import HEAD_COPIES, UpdateConfig, chunk_elements_of
from models.config.policy import ModelOutline

GRADIENT_BYTES: Final = 4
"""Gradients add up in float32 in every precision."""
MASTER_BYTES: Final = 4
"""DeepSpeed's float32 copy of what a rank steps, from ZeRO-1 on."""
MUCH: Final = 2**30
"""Bytes of a pass below which no layer is computed again, unless it is asked for."""


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The largest pass of an update."""

    tokens: int
    """Of all its rows, prompts included, that one rank computes."""

    @staticmethod
    def of(update: UpdateConfig, *, longest: int, completions: int, ranks: int) -> "PassSizes":
        """`longest` is a sequence in tokens; `completions` are those of an iteration."""
        slices = update.sequence_parallel
        step = -(-completions * slices // (update.minibatches * ranks)) * longest
        return PassSizes(tokens=-(-min(max(update.microbatch_tokens, longest), step) // slices))


def held_bytes(update: UpdateConfig, model: ModelOutline, *, ranks: int) -> dict[str, float]:
    """What a rank holds of a model under training; gradients and optimizer are of what is trained alone."""
    parameters, stage = model.parameters, update.running_stage
    trained = parameters if update.lora is None else update.lora.count_trained(model)
    held = parameters if update.lora is None else parameters + trained
    state = update.optimizer.state_bytes + (MASTER_BYTES if stage else 0)
    return {
        "trained_parameters": trained,
        "update_weights_bytes": held * BYTES[update.dtype] // (ranks if stage >= 3 else 1),
        "update_gradient_bytes": trained * GRADIENT_BYTES // (ranks if stage >= 2 else 1),
        "update_optimizer_bytes": int(trained * state) // (ranks if stage >= 1 else 1),
    }


def pass_bytes(update: UpdateConfig, model: ModelOutline, sizes: PassSizes, *, held: float) -> dict[str, float]:
    """What the largest pass adds at its height, between forward and backward, beside what is `held`.

    Writing on a CPU what was learnt takes a copy of it, when the pass has gone: what that is more is told apart.
    `recomputes` says whether its layers are computed again in the backward pass, by choice or by default: where they
    would keep more than all that is held, and more than 1 GiB.
    """
    number = BYTES[update.dtype]
    norms = model.norm_numbers * ((update.dtype == "bfloat16") - (update.lora is not None))
    block = sizes.tokens * number * (model.kept_numbers + norms)
    kept, inputs = block * model.blocks, sizes.tokens * number * model.hidden_size * model.blocks
    recomputes = update.activation_checkpointing
    if recomputes is None:
        recomputes = model.recomputes and kept > max(MUCH, held)
    activations = inputs + block * model.largest_block if recomputes else kept
    logits = sizes.tokens * model.vocab_size
    head = head_bytes(logits, memory=None)
    copied = number * (model.parameters if update.lora is None else update.lora.count_trained(model))
    return {
        "pass_logits": logits,
        "recomputes": float(recomputes),
        "kept_activations_bytes": kept,
        "update_activations_bytes": activations,
        "update_head_bytes": head,
        "update_writing_bytes": max(0.0, copied - activations - head),
    }


def head_bytes(logits: float, *, memory: float | None) -> float:
    """What the head adds in a pass of so many logits on a GPU with so much memory, none on a CPU."""
    return HEAD_COPIES * 4 * min(chunk_elements_of(memory), logits)
