"""Configuration of optimizers. Torch-free."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.variants import Variant
from rheostat.models.config.job import UpdateFacts


class Optimizer(Variant):
    """Fields common to all optimizers. `implementation` names a
    `rheostat.models.training.optimizers.OptimizerFunction`."""

    highest_zero_stage: ClassVar[int] = 3
    """Highest ZeRO stage that the optimizer supports. In higher stages each rank stores only a part of the data that a
    step of this optimizer needs."""
    state_bytes: ClassVar[float] = 8
    """Maximum bytes of optimizer state for each trained parameter."""
    package: ClassVar[tuple[str, str] | None] = None
    """Python module that the optimizer imports, and the pip requirement that installs it. None if no package is
    needed."""
    not_beside: ClassVar[str | None] = None
    """Python module that must not be installed, or None. If this module is installed, the optimizer's package uses it
    to load compiled code from the Hugging Face Hub."""

    def find_conflicts(self, update: UpdateFacts) -> Iterator[str]:
        """Yield one message for each setting of the update that does not work with this optimizer, and for each package
        that is missing or must not be installed."""
        name, max_stage = self.label, self.highest_zero_stage
        if update.running_stage > max_stage:
            bfloat16 = update.zero_stage <= max_stage
            setting = "dtype = 'bfloat16', which needs ZeRO-2" if bfloat16 else f"zero_stage = {update.zero_stage}"
            remedy = "update.dtype = 'float32'" if bfloat16 else f"it to at most {max_stage}"
            yield (
                f"update.optimizer.kind = {name!r} does not support update.{setting}. Set {remedy}, or use "
                "update.optimizer.kind = 'adamw'"
            )
        if self.package is not None and find_spec(self.package[0]) is None:
            yield (
                f"update.optimizer.kind = {name!r} needs the package {self.package[0]}, which is not installed. Run: "
                f"pip install '{self.package[1]}'"
            )
        if self.not_beside is not None and find_spec(self.not_beside) is not None:
            yield (
                f"update.optimizer.kind = {name!r} cannot be used while the package {self.not_beside} is installed, "
                "because it would load compiled code from the Hugging Face Hub. Run: pip uninstall "
                f"{self.not_beside}, or use kind = 'adamw'"
            )


class AdamW(Optimizer):
    """Adam optimizer with decoupled weight decay (arXiv 1711.05101)."""

    implementation = "rheostat.models.training.optimizers:adamw"

    kind: Literal["adamw"] = "adamw"


class Muon(Optimizer):
    """Optimizer that orthogonalizes the momentum of the weight matrices between embeddings and output layer, and uses
    AdamW for all other weights (Muon).

    Experts whose weights are stored in one tensor also use AdamW. Steps are scaled by 0.2 sqrt(max(rows, columns)) to
    the size of AdamW's steps (arXiv 2502.16982, section 2.2), so learning rates for AdamW can be used. Muon needs whole
    matrices, so it requires ZeRO stage 0 and float32.
    """

    implementation = "rheostat.models.training.optimizers:muon"
    highest_zero_stage = 0

    kind: Literal["muon"] = "muon"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the Nesterov momentum, from which the steps of the matrices are computed."""


class Adam8bit(Optimizer):
    """AdamW with 8-bit moments, quantized in blocks of 256 values (arXiv 2110.02861; `pip install
    'rheostat[adam8bit]'`).

    A stored optimizer state can only be loaded with the same number of ranks and, above ZeRO stage 0, with the same
    stage, because the blocks of a rank begin where its part of the values begins.
    """

    implementation = "rheostat.models.training.optimizers:adam8bit"
    highest_zero_stage = 2
    state_bytes = 2 + 8 / 256
    package = ("bitsandbytes", "bitsandbytes>=0.50,<1")
    not_beside = "kernels"

    kind: Literal["adam8bit"] = "adam8bit"


OptimizerConfig = Annotated[AdamW | Muon | Adam8bit, Field(discriminator="kind")]
