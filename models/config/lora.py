"""Configuration of low-rank adapters (LoRA). Torch-free."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Positive, Settings
from infra.errors import BadInput
from infra.plugins import nearest_name
from models.config.policy import ModelOutline


class LoraConfig(Settings):
    """Low-rank adapters that are trained instead of all weights (LoRA, arXiv 2106.09685). The other weights are
    frozen."""

    rank: Positive = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the adapters: alpha / rank x B A is added to the weight of a layer."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Layers that get an adapter: all linear layers except the output layer, or a list of names. A name may be the full
    name of a layer or the end of it, such as `q_proj`."""

    def choose(self, layers: Iterable[str], *, kind: str) -> list[str]:
        """Return the names in `layers` (linear layers of a model) that get an adapter.

        `kind` is the name of the model in messages. Raises BadInput if a target matches no layer.
        """
        linear = list(layers)
        if self.targets == "all-linear":
            return linear
        for target in self.targets:
            if not any(_matches_target(name, target) for name in linear):
                names = sorted({name.rpartition(".")[2] for name in linear})
                raise BadInput(
                    f"update.lora.targets contains {target!r}, but no linear layer of {kind} has this name. Use names "
                    f"from {', '.join(names)}{nearest_name(target, [*names, *linear])}"
                )
        return [name for name in linear if any(_matches_target(name, target) for target in self.targets)]

    def count_trained(self, model: ModelOutline) -> int:
        """Return the number of parameters that would be trained: the adapters, and the classifier head if there is
        one."""
        return self.rank * sum(model.layers[name] for name in self.choose(model.layers, kind=model.kind)) + model.head


def _matches_target(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
