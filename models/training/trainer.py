"""A model under training: one DeepSpeed engine, and where each ZeRO stage keeps the optimizer's state.

Every rank holds one and they act together. The learning rate is a pure function of the optimizer step: nothing to
save, nothing to lose on resume. Shapes: N written tokens of one pass.
"""

import gc
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import torch
from torch import Tensor

from infra.errors import Damaged
from infra.store.bundles import BundledFile
from infra.variants import implementation_of
from models.config.objectives import UpdateConfig
from models.modeling.adapters import adapters_off, has_adapters, save_adapters, trained_parameters
from models.modeling.experts import ExpertRouting
from models.modeling.head import Slopes
from models.modeling.layout import MicroBatch
from models.modeling.logprobs import ForwardInput, TokenModule
from models.training.optimizers import OptimizerFunction
from models.training.ranks import Ranks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def learning_rate(
    step: int,
    total_steps: int,
    *,
    peak: float,
    warmup_steps: int,
    schedule: Literal["constant", "linear", "cosine"],
    floor: float = 0.0,
) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up to the peak, then the schedule down to `floor` · peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (floor + (1 - floor) * left)


Forward = Callable[[MicroBatch], Tensor]
"""What a model says of a pass's written tokens; every rank calls it as often."""
Moments = dict[str, Tensor]
"""A rank's optimizer state by name: of AdamW `exp_avg.0`, `exp_avg_sq.0`, `step.0`, and in bfloat16 `master.0`."""

_LIKE_WEIGHTS: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2")
"""Parts of an optimizer's state that have a value for every weight."""


class Trainer:
    """Forward, backward and optimizer steps over a model that DeepSpeed shards over the ranks."""

    def __init__(self, module: TokenModule, update: UpdateConfig, *, ranks: Ranks) -> None:
        import deepspeed

        self._ranks = ranks
        self._max_grad_norm = update.max_grad_norm
        self._stage = update.running_stage
        module = module.to(ranks.device)
        module.slice_rows(ranks.slicing)
        module.checkpoint_layers(again=bool(update.activation_checkpointing))
        self._module, self._model = module, module.model
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        optimizer = cast(OptimizerFunction, implementation_of(update.optimizer))(module, update, update.optimizer)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=_engine_config(update))
        self._engine: DeepSpeedEngine = engine
        self._engine.eval()  # no dropout: log-probs must be those of the policy that generated
        for name, buffer in module.named_buffers():  # bfloat16 rotary frequencies would misplace distant tokens
            buffer.data = buffers[name]
        self._optimizer = optimizer

    def forward(self, batch: MicroBatch, *, slopes: Slopes | None = None) -> Tensor:
        """What the module says of the batch's written tokens; every rank calls it as often.

        `slopes` are those of the loss that `backward` is given next, where it is known token by token.
        """
        read = self._module.read(batch, self._ranks.device)
        if slopes is not None and isinstance(read, ForwardInput):  # what a denoiser reads has no head
            read = read._replace(slopes=self._scaled(slopes))
        return self._said(read)

    def _scaled(self, slopes: Slopes) -> Slopes:
        """Those of the loss as `backward` hands it on."""
        return lambda logprobs_C, places_C: slopes(logprobs_C, places_C) * self._ranks.world_size

    @torch.no_grad()
    def base_forward(self, batch: MicroBatch) -> Tensor:
        """What the module says without the adapters that are trained, as `forward` does; routers choose themselves."""
        with adapters_off(self._model):
            return self._said(self._module.read_anew(batch, self._ranks.device))

    def _said(self, read: ForwardInput) -> Tensor:
        return cast(Tensor, self._engine(read))

    def divergence(self, means_ND: Tensor) -> Tensor:
        """The divergence of each denoising step of the pass before from a reference with these means."""
        return self._module.divergence(means_ND)

    @torch.no_grad()
    def base_means(self, batch: MicroBatch) -> Tensor:
        """Means of the batch's denoising steps without the adapters that are trained."""
        self.base_forward(batch)
        return self._module.means

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of this rank's share of the loss; `last` ends the optimizer step's passes."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks, while shares add up.
        self._engine.backward(loss * self._ranks.world_size, scale_wrt_gas=False)
        if not last:
            self._engine.step()

    def step(self, learning_rate: float) -> float:
        """Clip, step, and return the gradients' global norm before clipping; not finite where a gradient is not."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        norm: float | None = None
        if self._stage == 0:
            norm = float(torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), self._max_grad_norm))
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        return norm if norm >= 0 else float("nan")  # DeepSpeed writes -1 for a norm that is not finite

    @property
    def denoising_steps(self) -> range:
        """Those that may be learnt, of a policy that draws; none of one that writes."""
        return self._module.denoising_steps

    @property
    def routing(self) -> ExpertRouting | None:
        """What the routers of a mixture of experts said in the pass before."""
        return self._module.routing

    @property
    def trains_adapters(self) -> bool:
        """Whether the base stays as it is."""
        return has_adapters(self._model)

    def save_weights(self, directory: Path) -> dict[str, BundledFile]:
        """Write the model as a Hugging Face directory on rank 0, or its adapters as peft does.

        Returns what the files of weights are. Under ZeRO-3 every rank holds all that is written meanwhile.
        """
        import deepspeed

        written = trained_parameters(self._model) if self.trains_adapters else list(self._model.parameters())
        with deepspeed.zero.GatheredParameters(written, enabled=self._stage == 3):
            if self._ranks.rank:
                return {}
            return save_adapters(self._model, directory) if self.trains_adapters else self._module.save(directory)

    def moments(self) -> Moments:
        """This rank's part of the optimizer state."""
        found: Moments = {}
        for index, partition in enumerate(self._partitions()):
            if self._stage and partition.dtype != next(self._model.parameters()).dtype:
                found[f"master.{index}"] = partition.detach()
            for name, value in self._optimizer.state[partition].items():
                found[f"{name}.{index}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return found

    def weights(self) -> list[Tensor]:
        """This rank's part of the trained weights: all of them, where the stage does not shard them."""
        return [getattr(weight, "ds_tensor", weight).detach() for weight in trained_parameters(self._engine.module)]

    @property
    def sizes(self) -> list[int]:
        """Numbers of values of the trained parameters, whole, in the engine's order."""
        return [int(getattr(weight, "ds_numel", weight.numel())) for weight in trained_parameters(self._engine.module)]

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the tensors of this rank's part of the optimizer state."""
        return [partition.shape for partition in self._partitions()]

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Continue with what `moments` returned on this rank of an equal engine."""
        expected = 0
        named: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            name, _, place = key.rpartition(".")
            if name != "master":
                named.setdefault(int(place), {})[name] = value.clone()
        for index, partition in enumerate(self._partitions()):
            state = named.get(index, {})
            for name in _LIKE_WEIGHTS:
                if name in state and state[name].shape != partition.shape:
                    raise Damaged(
                        f"optimizer state {name}.{index}: expected shape {tuple(partition.shape)}, "
                        f"found {tuple(state[name].shape)}"
                    )
            if (master := moments.get(f"master.{index}")) is not None:
                partition.data.copy_(master)
                expected += 1
            self._optimizer.state[partition] = {
                name: int(value) if value.dtype == torch.int64 else value.to(partition.device)  # counts of steps
                for name, value in state.items()
            }
            expected += len(state)
        if expected != len(moments):
            raise Damaged(f"optimizer state: expected {expected} tensors for this engine, found {len(moments)}")

    def close(self) -> None:
        """Give the memory back: DeepSpeed's hooks keep an engine alive after its last use, under ZeRO-3 for ever."""
        optimizer = self._engine.optimizer
        held = [*self._partitions(), *self._model.parameters()]
        self._engine.destroy()
        self._optimizer.state.clear()
        for tensor in held:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        for name in ("lp_param_buffer", "grad_partitions_flat_buffer"):  # ZeRO-3 keeps views of them
            if hasattr(optimizer, name):
                getattr(optimizer, name).untyped_storage().resize_(0)
        gc.collect()

    def _partitions(self) -> list[Tensor]:
        """The float32 tensors that this rank's optimizer steps, in the engine's order."""
        optimizer = self._engine.optimizer
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
            if hasattr(optimizer, name):  # ZeRO-3; ZeRO-1 and 2
                return list(getattr(optimizer, name))
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def frozen_forward(module: TokenModule, batch: MicroBatch) -> Tensor:
    """What a module that is not trained says of the batch's written tokens."""
    return cast(Tensor, module(module.read(batch, module.model.device)))


def _engine_config(update: UpdateConfig) -> dict[str, object]:
    stage = update.running_stage
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,  # accumulation is ours to end: see Trainer.backward
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, **_offloaded(update)},
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled; torch's fused AdamW steps on a CPU as well
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": update.max_grad_norm if stage else 0.0,
    }
    if update.dtype == "bfloat16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def _offloaded(update: UpdateConfig) -> dict[str, object]:
    on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    parts = {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[update.offload]
    return {f"offload_{part}": on_cpu for part in parts}
