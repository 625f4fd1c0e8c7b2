"""Updates on a GPU that does not exist, with PyTorch's build for CUDA and tensors without data.

A tensor on another device than the other inputs of an operation is an error, as on a GPU. A value that is read from the
device in the middle of an update is an error too. The program `python -m tests.support.fake_gpu` reads names of checks
as JSON and writes the error of each check, or null.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rheostat.infra.variants import implementation_of
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.layout import TrainingBatch, TrainingSample, lay_out_samples
from rheostat.models.modeling.logprobs import ForwardInput, TokenModule
from rheostat.models.objectives.loss_inputs import MetricSums
from rheostat.models.training import routers
from rheostat.models.training.ranks import Ranks
from rheostat.models.training.step_plans import StepBatches
from rheostat.models.training.update_steps import ExtraLogprobs, take_steps, take_value_steps

GPU = torch.device("cuda", 0)
RANKS = Ranks(rank=0, world_size=1, device=GPU)
H100 = SimpleNamespace(total_memory=85_000_000_000, major=9, minor=0, name="NVIDIA H100 80GB HBM3")


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Run the block with fake tensors and the properties of an H100."""

    def reduce(tensor: Tensor, op: object = None) -> None:
        assert tensor.device == GPU, "NCCL reduces only tensors on the GPU"

    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        patch("torch.cuda.get_device_properties", lambda device=None: H100),
        patch("torch.distributed.all_reduce", reduce),
        # What is read from the device at the end of an update.
        patch.object(MetricSums, "unpacked", lambda self, *_: (dict.fromkeys(self._sums, 1.0), {})),
        patch.object(routers.RouterTally, "metrics", lambda self, steps: {}),
    ):
        yield mode


def move(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Replace the parameters and buffers of a module by fake ones on the GPU, and parameters cast to a data type.
    Tensors that are no parameters or buffers stay on the CPU, as with `module.to`."""
    moved: dict[int, Any] = {}
    for layer in module.modules():
        for name, each in [*layer._parameters.items(), *layer._buffers.items()]:
            if each is None:
                continue
            if id(each) not in moved:
                fake = mode.from_tensor(each.detach()).to(GPU)
                is_parameter = isinstance(each, nn.Parameter)
                moved[id(each)] = nn.Parameter(fake.to(dtype), each.requires_grad) if is_parameter else fake
            (layer._parameters if name in layer._parameters else layer._buffers)[name] = moved[id(each)]


class FakeTrainer:
    """Stand-in for `Trainer` without DeepSpeed: one rank that trains a module on the GPU."""

    def __init__(self, module: TokenModule, config: UpdateConfig, mode: FakeTensorMode) -> None:
        move(module, mode, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
        module.checkpoint_layers(is_enabled=bool(config.activation_checkpointing))
        self.module = module
        self.optimizer: Any = implementation_of(config.optimizer)(module, config, config.optimizer)
        self.num_steps = 0

    def forward(self, batch: Any, *, loss_gradient: Any = None, with_entropy: bool = False) -> Tensor:
        inputs = self.module.prepare_inputs(batch, GPU)
        if isinstance(inputs, ForwardInput):
            inputs = inputs._replace(loss_gradient=loss_gradient, with_entropy=with_entropy)
        outputs: Tensor = self.module(inputs)
        assert (outputs.device, outputs.dtype, len(outputs)) == (GPU, torch.float32, len(batch.targets_N))
        return outputs

    def backward(self, loss: Tensor, *, last: bool) -> None:
        assert loss.device == GPU and loss.dim() == 0
        loss.backward()

    def step(self, learning_rate: float) -> float:
        trained = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        absent = [name for name, each in trained.items() if each.grad is None]
        assert len(absent) < len(trained), "no parameter has a gradient"
        for each in trained.values():
            assert each.grad is None or (each.grad.device, each.grad.dtype) == (GPU, each.dtype)
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return 1.0

    def divergence(self, means_ND: Tensor) -> Tensor:
        return self.module.divergence(means_ND)

    @property
    def denoising_steps(self) -> range:
        return self.module.denoising_steps

    @property
    def routing(self) -> Any:
        return self.module.routing


def training_batch(inputs: Any, *, valued: bool = False) -> TrainingBatch:
    """Lay out sequences with random log-probs and advantages, some of them stale."""
    rng, samples = np.random.default_rng(0), []
    for each in inputs:
        count = len(each.trained_positions)
        numbers = rng.normal(size=(4, count)).astype(np.float32)
        extra = (numbers[2], numbers[3]) if valued else (None, None)
        samples.append(
            TrainingSample(each, -np.abs(numbers[0]), numbers[1], np.arange(count, dtype=np.int16) % 2, *extra)
        )
    return lay_out_samples(samples, [0.1] * len(samples))


def train(build: Callable[[], TokenModule], inputs: Any, config: UpdateConfig) -> None:
    """Take the optimizer steps of an update with two epochs of one minibatch, which has two micro-batches."""
    module = build()
    batches = tuple(training_batch(part) for part in (inputs, inputs[:2]))
    steps = [StepBatches(batches, learning_rate=1e-3, computes_old=True, minibatch=0)] * 2
    with fake_gpu() as mode:
        trainer: Any = FakeTrainer(module, config, mode)
        needs_kl = config.kl_penalty is not None
        reference = [[trainer.forward(each.microbatch).detach() if needs_kl else None for each in batches]]
        extras = ExtraLogprobs(old=[[None, None]], reference=reference)
        take_steps(trainer, steps, extras, config=config, kl_coefficient=0.1, ranks=RANKS, on_progress=lambda: None)
    assert trainer.num_steps == len(steps)


def train_values(build: Callable[[], TokenModule], inputs: Any, config: UpdateConfig) -> None:
    """Take one optimizer step of a critic."""
    module = build()
    steps = [StepBatches((training_batch(inputs, valued=True),), learning_rate=1e-3, computes_old=False, minibatch=0)]
    with fake_gpu() as mode:
        trainer: Any = FakeTrainer(module, config, mode)
        take_value_steps(trainer, steps, clip=0.2, ranks=RANKS, on_progress=lambda: None)
    assert trainer.num_steps == 1


def main() -> None:
    """Run the checks whose names are on standard input, and write their errors."""
    from tests.support.fake_updates import CHECKS

    assert torch.version.cuda is not None, "this program needs PyTorch's build for CUDA"
    errors: dict[str, str | None] = {}
    for name in json.load(sys.stdin):
        try:
            with patch("torch.cuda.is_available", lambda: False):  # models are built on the CPU
                CHECKS[name]()
            errors[name] = None
        except Exception as error:
            sys.stderr.write(f"---- {name}\n{traceback.format_exc()}\n")
            errors[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"\n{json.dumps(errors)}\n")


if __name__ == "__main__":
    main()
