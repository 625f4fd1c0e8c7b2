"""Activation checkpointing: a layer's backward pass computes again what its forward pass did not keep.

transformers does it for models in training mode alone; ours are in evaluation mode, so that nothing is dropped out.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from models.modeling.shared_prompts import reading_again


def layers_to_recompute(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The layers of which transformers says that they can be computed again; a few old models have none."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Have each layer keep its inputs alone for the backward pass; gradients stay as they are, to the bit."""
    for layer in layers_to_recompute(model):
        layer.forward = partial(_recomputed, layer.forward)  # inside the hooks by which ZeRO-3 gathers weights


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- whatever the model passes on
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    again = reading_again()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again()

    # Nothing random is inside, and under ZeRO-3 weights are empty when they are saved and whole when compared.
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=False,
        determinism_check="none",
        **kwargs,
    )
