"""Activation checkpointing: a layer's backward pass computes again what its forward pass did not keep.

transformers does it for models in training mode alone; ours are in evaluation mode, so that nothing is dropped out.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
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


def checkpoint_denoiser(model: Any, *, again: bool) -> None:  # noqa: ANN401 -- diffusers has few types
    """Do the same of a denoiser of diffusers where `again`; it names a layer that can be computed again as it calls it.

    Else layers are called in the same way: under ZeRO-3, whose hooks see what is given by position alone, gradients of
    what all layers read would add up in another order.
    """
    found = set[nn.Module]()

    def call(layer: nn.Module, *args: Any) -> Any:  # noqa: ANN401
        if again and layer not in found:
            found.add(layer)
            layer.forward = partial(_recomputed, layer.forward)
        return layer(*args)

    model.enable_gradient_checkpointing(call)


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
