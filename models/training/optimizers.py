"""Functions that build the optimizer of a model under training.

The settings class of each optimizer names its function. Each optimizer updates only the trainable parameters, and
starts with a learning rate of 0. The contents of a parameter's state depend on the optimizer and are saved unchanged.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.optimizers import Adam8bit, AdamW, Muon
from rheostat.models.modeling.adapters import trained_parameters
from rheostat.models.modeling.logprobs import TokenModule
from rheostat.models.modeling.trunk import find_trunk

OptimizerFunction = Callable[[TokenModule, UpdateConfig, Any], Optimizer]
"""Function that builds an optimizer. Its arguments are the module under training, the settings of the update and the
optimizer's own settings."""


def adamw(module: TokenModule, update: UpdateConfig, settings: AdamW) -> Optimizer:
    """Build the optimizer AdamW, which is Adam with decoupled weight decay (arXiv 1711.05101), for the trained
    parameters of `module`."""
    return _build_adamw(trained_parameters(module), update)


def muon(module: TokenModule, update: UpdateConfig, settings: Muon) -> Optimizer:
    """Build an optimizer that applies Muon (momentum, orthogonalized) to hidden matrices and AdamW to all other trained
    parameters."""
    hidden = hidden_matrices(module.model)
    hidden_ids = {id(parameter) for parameter in hidden}
    remaining = [parameter for parameter in trained_parameters(module) if id(parameter) not in hidden_ids]
    parts: list[Optimizer] = []
    if hidden:
        orthogonal = torch.optim.Muon(
            hidden,
            lr=0.0,
            weight_decay=update.weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        parts.append(orthogonal)
    if remaining:
        parts.append(_build_adamw(remaining, update))
    return _Parts(parts)


def adam8bit(module: TokenModule, update: UpdateConfig, settings: Adam8bit) -> Optimizer:
    """Build the optimizer AdamW with moments stored in 8 bits, quantized in blocks of 256 values (arXiv 2110.02861)."""
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(
        trained_parameters(module), lr=0.0, betas=(update.beta1, update.beta2), weight_decay=update.weight_decay
    )
    return cast(Optimizer, optimizer)


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weight matrices that Muon updates: all trained matrices except those of the embeddings and the output
    head."""
    embedded = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    trunk = trained_parameters(find_trunk(model))
    return [parameter for parameter in trunk if parameter.ndim == 2 and id(parameter) not in embedded]


def _build_adamw(parameters: list[nn.Parameter], update: UpdateConfig) -> Optimizer:
    return torch.optim.AdamW(
        parameters, lr=0.0, betas=(update.beta1, update.beta2), weight_decay=update.weight_decay, fused=True
    )


class _Parts(Optimizer):
    """Several optimizers combined into one optimizer that shares their parameter groups and state."""

    def __init__(self, parts: list[Optimizer]) -> None:
        super().__init__(list(chain.from_iterable(part.param_groups for part in parts)), {})
        for part in parts:
            part.state = self.state
        self._parts = parts

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # DeepSpeed gives no closure
        """Take one step with each of the combined optimizers."""
        for part in self._parts:
            part.step()
