"""Configuration of low-rank adapters. Torch-free."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Positive, Settings
from infra.errors import BadInput
from infra.plugins import nearest_name
from models.config.policy import ModelOutline


class LoraConfig(Settings):
    """Low-rank adapters in place of full weights (LoRA, arXiv 2106.09685); the base stays as it is."""

    rank: Positive = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """The delta is alpha / rank x B A."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get one: all linear ones but the head, or the ends of their names."""

    def choose(self, layers: Iterable[str], *, kind: str) -> list[str]:
        """Choose among a model's linear layers. Raises BadInput where a target names none; `kind` is the model's."""
        linear = list(layers)
        if self.targets == "all-linear":
            return linear
        for target in self.targets:
            if not any(_is_named(name, target) for name in linear):
                known = sorted({name.rpartition(".")[2] for name in linear})
                raise BadInput(
                    f"lora.targets {target!r}: no linear layer of {kind} has that name; expected some of "
                    f"{', '.join(known)}{nearest_name(target, [*known, *linear])}"
                )
        return [name for name in linear if any(_is_named(name, target) for target in self.targets)]

    def count_trained(self, model: ModelOutline) -> int:
        """Count the parameters that training would change of a model without adapters."""
        return self.rank * sum(model.layers[name] for name in self.choose(model.layers, kind=model.kind)) + model.head


def _is_named(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
