"""Models that an update rank only runs forward: the reference of the policy, and teachers.

Under ZeRO-3 their weights are sharded over the ranks like those of the policy. DeepSpeed gathers the weights of one
layer after another during each forward pass.
"""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.head import TopTokens
from rheostat.models.modeling.layout import MicroBatch
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs, TokenModule
from rheostat.models.modeling.parameter_storage import DTYPES, cast_parameters
from rheostat.models.modeling.policy import load_policy, load_vision
from rheostat.models.modeling.trials import float32_trials
from rheostat.models.records.media import ImageSource
from rheostat.models.training.ranks import Ranks
from rheostat.models.training.sharding import choose_storage
from rheostat.models.training.trainer import build_engine_config, release_parameters

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class FrozenModel:
    """Model that is never trained, in the dtype of `update`, and under ZeRO-3 sharded over the ranks."""

    def __init__(self, module: TokenModule, update: UpdateConfig, *, ranks: Ranks) -> None:
        cast_parameters(module, DTYPES[update.dtype])
        self._module = module.requires_grad_(False).eval().to(ranks.device)
        with float32_trials():
            module.enable_sequence_parallelism(ranks.sequence_parallel_group)
        self._device = ranks.device
        self._engine = _start_engine(module, update) if update.shards_weights else None

    @torch.no_grad()
    def forward(self, batch: MicroBatch) -> Tensor:
        """Compute one value per completion token of a micro-batch. Collective under ZeRO-3: every rank must call this
        the same number of times."""
        inputs: ForwardInput = self._module.prepare_inputs(batch, self._device)
        return cast(Tensor, (self._engine or self._module)(inputs))

    def means(self, batch: MicroBatch) -> Tensor:
        """Return the mean of the next state at each denoising step. Only for text-to-image policies. Collective under
        ZeRO-3."""
        self.forward(batch)
        return self._module.means

    def close(self) -> None:
        """Release the memory of the model. The model must not be used afterwards."""
        if self._engine is not None:
            self._engine.destroy()
        release_parameters(self._module)
        gc.collect()


def _start_engine(module: TokenModule, update: UpdateConfig) -> "DeepSpeedEngine":
    """Return a DeepSpeed engine without an optimizer, which shards the weights that are not sharded yet, and gathers
    them in forward passes. Collective: every rank must call this."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=module, config=build_engine_config(update))
    return cast("DeepSpeedEngine", engine.eval())


def load_frozen_policy(
    directory: Path,
    update: UpdateConfig,
    *,
    temperature: float,
    images: ImageSource | None = None,
    top: TopTokens | None = None,
    ranks: Ranks,
) -> FrozenModel:
    """Load a language model that this run trained or imported, in the dtype and layout of `update`. Collective under
    ZeRO-3: every rank must call this.

    The model computes exactly like a policy under training: with equal weights, the same micro-batch gives equal
    log-probs. With `top`, it also returns the most probable tokens at each completion token.
    """
    model = load_policy(directory, storage=choose_storage(update, ranks=ranks))
    # Under ZeRO-3 every rank must take part in the gathering of weights, so the tower runs in every micro-batch.
    vision = load_vision(directory, source=images, is_frozen=not update.shards_weights)
    with float32_trials():
        module = TokenLogprobs(model, temperature=temperature, vision=vision, attention=update.attention, top=top)
    return FrozenModel(module, update, ranks=ranks)
