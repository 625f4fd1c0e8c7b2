"""Configuration of optimizers: what makes steps of gradients. Torch-free."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from infra.variants import Variant

if TYPE_CHECKING:
    from models.config.objectives import UpdateConfig


class Optimizer(Variant):
    """What all optimizers share. `implementation` is a `models.training.optimizers.OptimizerFunction`."""

    highest_zero_stage: ClassVar[int] = 3
    """From the next stage on, ranks hold parts of the state that it cannot step."""
    state_bytes: ClassVar[float] = 8
    """What it keeps of each value that is trained, at most."""
    package: ClassVar[tuple[str, str] | None] = None
    """Module that it needs beside the default installation, and what installs it."""
    not_beside: ClassVar[str | None] = None
    """Module through which its package would load compiled code from a hub."""

    def reasons_against(self, update: "UpdateConfig") -> Iterator[str]:
        """Yield one line per setting of the update, or lack of a package, with which it cannot work."""
        name, most = self.known_as, self.highest_zero_stage
        if update.running_stage > most:
            bfloat16 = update.zero_stage <= most
            found = "dtype 'bfloat16', which ZeRO-2 holds" if bfloat16 else f"zero_stage {update.zero_stage}"
            remedy = "use dtype = 'float32'" if bfloat16 else f"use at most {most}"
            yield f"update.optimizer.kind {name!r} with update.{found}: {remedy}, or kind = 'adamw'"
        if self.package is not None and find_spec(self.package[0]) is None:
            yield (
                f"update.optimizer.kind {name!r}: expected the package {self.package[0]}, found none; "
                f"pip install '{self.package[1]}'"
            )
        if self.not_beside is not None and find_spec(self.not_beside) is not None:
            yield (
                f"update.optimizer.kind {name!r} beside the package {self.not_beside}: compiled code of a hub would be "
                f"loaded through it; pip uninstall {self.not_beside}, or use kind = 'adamw'"
            )


class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    implementation = "models.training.optimizers:adamw"

    kind: Literal["adamw"] = "adamw"


class Muon(Optimizer):
    """Orthogonalised momentum for the matrices between embeddings and head, AdamW for all else, which is also where
    experts are whose matrices lie in one tensor.

    Its steps are scaled to AdamW's size, 0.2 sqrt(max(rows, columns)) (arXiv 2502.16982, section 2.2), so that learning
    rates are AdamW's. It sees whole matrices: ZeRO stage 0, in float32.
    """

    implementation = "models.training.optimizers:muon"
    highest_zero_stage = 0

    kind: Literal["muon"] = "muon"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum; Nesterov's."""


class Adam8bit(Optimizer):
    """AdamW whose moments are kept in 8 bits, by blocks of 256 (arXiv 2110.02861; `pip install 'rheostat[adam8bit]'`).

    A state belongs to ranks of one number and, above stage 0, one ZeRO stage: blocks are cut where the ranks' parts
    are.
    """

    implementation = "models.training.optimizers:adam8bit"
    highest_zero_stage = 2
    state_bytes = 2 + 8 / 256
    package = ("bitsandbytes", "bitsandbytes>=0.50,<1")
    not_beside = "kernels"

    kind: Literal["adam8bit"] = "adam8bit"


OptimizerConfig = Annotated[AdamW | Muon | Adam8bit, Field(discriminator="kind")]
