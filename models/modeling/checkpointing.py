"""Activation checkpointing: a layer keeps only its inputs, and the backward pass recomputes the activations inside it.

transformers supports this only for models in training mode. Models here are in evaluation mode, which turns dropout
off.
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

from rheostat.models.modeling.shared_prompts import capture_shared_tokens


def layers_to_recompute(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that support activation checkpointing (recomputation in the backward pass). The list is empty
    for some old model classes."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn on activation checkpointing for all layers that support it. Gradients stay the same, bit for bit."""
    for layer in layers_to_recompute(model):
        layer.forward = partial(_recomputed, layer.forward)  # inside the hooks with which ZeRO-3 gathers weights


def checkpoint_denoiser(model: Any, *, is_enabled: bool) -> None:  # noqa: ANN401 -- diffusers has few types
    """Turn on activation checkpointing for a diffusers denoiser if `is_enabled` is set.

    Each layer is wrapped at its first call, because diffusers has no list of the layers that can be recomputed.
    diffusers calls layers with positional arguments only in its checkpointing mode, so this mode is turned on without
    `is_enabled` too: the hooks of ZeRO-3 see only positional arguments, and another kind of call would change the order
    in which gradients of shared inputs are summed.
    """
    found = set[nn.Module]()

    def call(layer: nn.Module, *args: Any) -> Any:  # noqa: ANN401
        if is_enabled and layer not in found:
            found.add(layer)
            layer.forward = partial(_recomputed, layer.forward)
        return layer(*args)

    model.enable_gradient_checkpointing(call)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- whatever the model passes on
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    again = capture_shared_tokens()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again()

    # Layers contain nothing random. Under ZeRO-3 weights are empty when saved and whole when compared, so the check is
    # off.
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=False,
        determinism_check="none",
        **kwargs,
    )
