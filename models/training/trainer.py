"""Trainer: a model under training in a DeepSpeed engine, and access to its optimizer's state under each ZeRO stage.

Every rank has one trainer, and all ranks call its methods together. The learning rate depends only on the index of the
optimizer step, so no scheduler state is saved. Shapes: N completion tokens of one micro-batch.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import torch
from torch import Tensor, nn

from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import BundledFile
from rheostat.infra.variants import implementation_of
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.adapters import disable_adapters, has_adapters, save_adapters, trained_parameters
from rheostat.models.modeling.experts import ExpertRouting
from rheostat.models.modeling.head import LossGradient, TopTokens
from rheostat.models.modeling.layout import MicroBatch
from rheostat.models.modeling.lazy_tensors import build_lazy_state
from rheostat.models.modeling.logprobs import ForwardInput, TokenModule
from rheostat.models.modeling.parameter_storage import DTYPES, cast_parameters
from rheostat.models.modeling.safetensors import FileShare, copy_to_host
from rheostat.models.modeling.trials import float32_trials
from rheostat.models.training.optimizers import OptimizerFunction
from rheostat.models.training.ranks import Ranks

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
    """Return the learning rate of optimizer step `step`, counted from 0. It warms up linearly to `peak` over
    `warmup_steps` steps, and then decays according to `schedule` to `floor` times `peak`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (floor + (1 - floor) * remaining)


Forward = Callable[[MicroBatch], Tensor]
"""Function that computes one value per completion token of a micro-batch.

Collective: every rank must call the function the same number of times.
"""
Moments = dict[str, Tensor]
"""Tensors of one rank's optimizer state, keyed by name. AdamW has `exp_avg.0`, `exp_avg_sq.0` and `step.0`, and in
bfloat16 also `master.0`, the float32 weights."""

_LIKE_WEIGHTS: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2")
"""Names of the tensors in optimizer states that have one value for every weight."""

_BUFFERS: Final = ("lp_param_buffer", "grad_partitions_flat_buffer")
"""Attributes of DeepSpeed's optimizer of ZeRO-3 with the buffers of weights and gradients."""


class Trainer:
    """Model under training, sharded over the ranks by DeepSpeed: its forward passes, backward passes and optimizer
    steps."""

    def __init__(self, module: TokenModule, update: UpdateConfig, *, ranks: Ranks) -> None:
        import deepspeed

        self._ranks = ranks
        self._max_grad_norm = update.max_grad_norm
        self._stage = update.running_stage
        cast_parameters(module, DTYPES[update.dtype])  # adapters and denoisers are loaded in float32
        module = module.to(ranks.device)
        with float32_trials():
            module.enable_sequence_parallelism(ranks.sequence_parallel_group)
        module.checkpoint_layers(is_enabled=bool(update.activation_checkpointing))
        self._module, self._model = module, module.model
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        optimizer = cast(OptimizerFunction, implementation_of(update.optimizer))(module, update, update.optimizer)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=build_engine_config(update))
        self._engine: DeepSpeedEngine = engine
        self._engine.eval()  # no dropout, because log-probs must be those of the policy that generated the tokens
        for name, buffer in module.named_buffers():  # bfloat16 rotary frequencies would misplace distant tokens
            buffer.data = buffers[name]
        self._optimizer = optimizer

    def forward(
        self,
        batch: MicroBatch,
        *,
        loss_gradient: LossGradient | None = None,
        with_entropy: bool = False,
        candidates_NK: Tensor | None = None,
        top: TopTokens | None = None,
    ) -> Tensor:
        """Compute one value per completion token of a micro-batch, such as a log-prob. If the gradient of the loss that
        the next `backward` receives is a known function of each token's log-prob, pass this function as
        `loss_gradient`. With `with_entropy`, a language policy returns log-probs and entropies, of shape (N, 2). With
        `candidates_NK`, the IDs of K further tokens at each completion token, it returns 1 + K log-probs per completion
        token. With `top`, it returns the most probable tokens too (`HeadSettings.top_logprobs`). Collective: every rank
        must call this the same number of times."""
        inputs = self._module.prepare_inputs(batch, self._ranks.device)
        if candidates_NK is not None:
            inputs = inputs.with_candidates(candidates_NK)
        # The input of a denoiser has no language-model head.
        if loss_gradient is not None and isinstance(inputs, ForwardInput):
            inputs = inputs._replace(loss_gradient=self._scale_loss_gradient(loss_gradient))
        if with_entropy:
            inputs = inputs._replace(with_entropy=True)
        if top is not None:
            inputs = inputs._replace(top=top)
        return self._run_engine(inputs)

    def _scale_loss_gradient(self, loss_gradient: LossGradient) -> LossGradient:
        """Return a function like `loss_gradient` whose result is multiplied by the factor that `backward` applies to
        the loss."""
        return lambda logprobs_C, places_C: loss_gradient(logprobs_C, places_C) * self._ranks.world_size

    @torch.no_grad()
    def base_forward(self, batch: MicroBatch) -> Tensor:
        """Compute one value per completion token, like `forward`, with the trained adapters disabled.
        Mixture-of-experts routers choose experts freely instead of reusing recorded choices. Collective: every rank
        must call this."""
        with disable_adapters(self._model):
            return self._run_engine(self._module.prepare_inputs_without_replay(batch, self._ranks.device))

    def _run_engine(self, inputs: ForwardInput) -> Tensor:
        return cast(Tensor, self._engine(inputs))

    def divergence(self, means_ND: Tensor) -> Tensor:
        """Return the KL divergence between a text-to-image policy and its reference for each denoising step of the
        latest forward pass. `means_ND` contains the means of the next states that the reference predicts for these
        steps."""
        return self._module.divergence(means_ND)

    @torch.no_grad()
    def base_means(self, batch: MicroBatch) -> Tensor:
        """Return the mean of the next state that the base weights predict for each denoising step, with the trained
        adapters disabled. Only for text-to-image policies. Collective: every rank must call this."""
        self.base_forward(batch)
        return self._module.means

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run the backward pass of `loss`, this rank's part of the step's loss, and add the gradients to those of
        earlier micro-batches. Set `last` for the last micro-batch of an optimizer step."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks, but the shares of the loss must be summed.
        self._engine.backward(loss * self._ranks.world_size, scale_wrt_gas=False)
        if not last:
            self._engine.step()

    def step(self, learning_rate: float) -> float:
        """Clip the gradients, take an optimizer step, and return the gradient norm before clipping, over all ranks. The
        norm is not finite if a gradient is not finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        norm: float | None = None
        if self._stage == 0:
            norm = float(torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), self._max_grad_norm))
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        return norm if norm >= 0 else float("nan")  # DeepSpeed returns -1 for a norm that is not finite

    @property
    def denoising_steps(self) -> range:
        """Denoising steps that may be trained. The range is empty for policies that generate text."""
        return self._module.denoising_steps

    @property
    def vocab_size(self) -> int:
        """Number of token IDs of the model's head, or 0 for models without a language-model head."""
        return self._module.vocab_size

    @property
    def routing(self) -> ExpertRouting | None:
        """Outputs of the mixture-of-experts routers in the latest forward pass, or None for a model without experts."""
        return self._module.routing

    @property
    def shares_prompts(self) -> bool:
        """Whether the model supports micro-batches in which several sequences are concatenated in a single row."""
        return self._module.shares_prompts

    @property
    def trains_adapters(self) -> bool:
        """Whether only adapters are trained and the base weights stay fixed."""
        return has_adapters(self._model)

    def save_weights(
        self, directory: Path, *, writers: int = 1, on_progress: Callable[[], None] = lambda: None
    ) -> dict[str, BundledFile]:
        """Write the model as a Hugging Face directory, or its adapters in peft's format. The weight files are divided
        among the first `writers` ranks. Rank 0 writes the adapters.

        Returns size and digest of the weight files that this rank has written, by name. `on_progress` is called after
        each chunk of the files. Collective: under ZeRO-3 the ranks gather all adapters together, but the weights of a
        model one after another.
        """
        if self.trains_adapters:
            with self._gathered(trained_parameters(self._model)):
                return {} if self._ranks.rank else save_adapters(self._model, directory, on_progress=on_progress)
        share = FileShare(self._ranks.rank, writers, gathers=self._stage == 3)
        if not share.gathers and self._ranks.rank >= writers:
            return {}
        state = build_lazy_state(self._model, self._gather) if share.gathers else None
        return self._module.save(directory, state=state, share=share, on_progress=on_progress)

    def _gather(self, parameter: nn.Parameter, writer: int) -> Tensor:
        """Gather a sharded parameter on all ranks. Return a copy on the rank `writer`, and a tensor on the meta device
        on other ranks. Collective: every rank must call this."""
        with self._gathered([parameter]):
            return copy_to_host(parameter) if self._ranks.rank == writer else torch.empty_like(parameter, device="meta")

    def _gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Run the block with the whole values of these parameters on every rank."""
        import deepspeed

        return cast(
            AbstractContextManager[None], deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3)
        )

    def moments(self) -> Moments:
        """Return this rank's part of the optimizer state, such as Adam's moments, by tensor name."""
        moments: Moments = {}
        for index, partition in enumerate(self._partitions()):
            if self._stage and partition.dtype != next(self._model.parameters()).dtype:
                moments[f"master.{index}"] = partition.detach()
            for name, value in self._optimizer.state[partition].items():
                moments[f"{name}.{index}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return moments

    def weights(self) -> list[Tensor]:
        """Return this rank's part of the trained weights. Only ZeRO stage 3 divides weights among ranks."""
        return [getattr(weight, "ds_tensor", weight).detach() for weight in trained_parameters(self._engine.module)]

    @property
    def sizes(self) -> list[int]:
        """Number of values of each trained parameter before sharding, in the order of DeepSpeed's engine."""
        return [int(getattr(weight, "ds_numel", weight.numel())) for weight in trained_parameters(self._engine.module)]

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the tensors in this rank's part of the optimizer state."""
        return [partition.shape for partition in self._partitions()]

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Load an optimizer state that the method `moments` returned on the same rank, with the same settings. Raises
        Damaged if the tensors do not fit."""
        expected = 0
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            name, _, place = key.rpartition(".")
            if name != "master":
                states.setdefault(int(place), {})[name] = value.clone()
        for index, partition in enumerate(self._partitions()):
            state = states.get(index, {})
            for name in _LIKE_WEIGHTS:
                if name in state and state[name].shape != partition.shape:
                    raise Damaged(
                        f"the tensor {name}.{index} of the optimizer state must have the shape "
                        f"{tuple(partition.shape)}, but it has {tuple(state[name].shape)}. Restore the state from a "
                        "copy of the run"
                    )
            if (master := moments.get(f"master.{index}")) is not None:
                partition.data.copy_(master)
                expected += 1
            self._optimizer.state[partition] = {
                name: int(value) if value.dtype == torch.int64 else value.to(partition.device)  # step counts
                for name, value in state.items()
            }
            expected += len(state)
        if expected != len(moments):
            raise Damaged(
                f"the optimizer state must have {expected} tensors for this configuration, but it has {len(moments)}. "
                "Restore the state from a copy of the run"
            )

    def close(self) -> None:
        """Release the memory of the DeepSpeed engine. Without this call, DeepSpeed's hooks would keep an unused engine
        alive."""
        optimizer, partitions = self._engine.optimizer, self._partitions()
        self._engine.destroy()
        self._optimizer.state.clear()
        release_parameters(self._module)
        buffers = [getattr(optimizer, name) for name in _BUFFERS if hasattr(optimizer, name)]
        for buffer in buffers:
            if buffer.untyped_storage().resizable():  # DeepSpeed keeps views of it
                buffer.untyped_storage().resize_(0)
        flat = [part for part in getattr(optimizer, "fp16_partitioned_groups_flat", ()) if part is not None]
        _release(*partitions, *buffers, *flat)
        gc.collect()

    def _partitions(self) -> list[Tensor]:
        """Return the float32 tensors that this rank's optimizer updates, in the engine's order."""
        optimizer = self._engine.optimizer
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
            if hasattr(optimizer, name):  # ZeRO-3; ZeRO-1 and 2
                return list(getattr(optimizer, name))
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def release_parameters(module: nn.Module) -> None:
    """Release the memory of all parameters, and under ZeRO-3 that of this rank's shards. DeepSpeed keeps references to
    the parameters of an engine that has ended."""
    for parameter in module.parameters():
        _release(parameter, getattr(parameter, "ds_tensor", parameter))


def _release(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def build_engine_config(update: UpdateConfig) -> dict[str, object]:
    """Return DeepSpeed's configuration for an update, or for a model that is only run forward in `update.dtype`."""
    stage = update.running_stage
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,  # Trainer.backward ends the accumulation
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, **_offloaded(update)},
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled; torch's fused AdamW also works on a CPU
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
