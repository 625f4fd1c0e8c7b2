"""Gradients of a module after a forward and a backward pass, and the activations that it keeps in between."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rheostat.models.modeling.logprobs import TokenModule


def compute_gradients(module: TokenModule, read: Any) -> tuple[Tensor, dict[str, Tensor | None], int]:
    """Return log-probs, gradients, and the bytes kept from the forward pass to the backward pass."""
    kept: dict[int, Tensor] = {}
    weights = {each.untyped_storage().data_ptr() for each in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found_N = module(read)
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    (found_N * torch.linspace(-1, 1, len(found_N))).sum().backward()
    return found_N.detach(), {name: each.grad for name, each in module.named_parameters()}, held
