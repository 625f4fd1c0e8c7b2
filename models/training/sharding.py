"""Storage of the parameters of the models in an update rank: in the dtype of the model, and under ZeRO-3 as shards.

Without shards, a model that needs the memory of several GPUs could not be loaded: each GPU would have to hold all of
its parameters before DeepSpeed divides them.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.parameter_storage import DTYPES, ParameterStorage, Shard
from rheostat.models.modeling.trials import is_sharded
from rheostat.models.training.ranks import Ranks, any_rank
from rheostat.models.training.trainer import build_engine_config


def choose_storage(update: UpdateConfig, *, ranks: Ranks) -> ParameterStorage:
    """Return how a rank stores the parameters of a model in `update.dtype`. Collective: every rank must call this, and
    then load the model."""
    dtype = DTYPES[update.dtype]
    if not update.shards_weights:
        return ParameterStorage(dtype, ranks.device)
    return ParameterStorage(dtype, ranks.device, _build_shard(update, ranks), partial(any_rank, ranks=ranks))


def _build_shard(update: UpdateConfig, ranks: Ranks) -> Shard:
    """Return the function that keeps this rank's part of a parameter, as DeepSpeed divides parameters.

    DeepSpeed would copy every parameter to the GPU and send it from rank 0 to all ranks first. This is not needed,
    because each rank reads the same verified files.
    """
    import deepspeed

    # With a module, like the trainer's engine, DeepSpeed also replaces torch's linear function.
    init: Any = deepspeed.zero.Init(
        module=nn.Module(), config_dict_or_path=build_engine_config(update), dtype=DTYPES[update.dtype]
    )

    def shard(parameter: nn.Parameter) -> None:
        if not is_sharded(parameter):
            init._convert_to_deepspeed_param(parameter)
            cast(Any, parameter).partition()
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=ranks.device)

    return shard
