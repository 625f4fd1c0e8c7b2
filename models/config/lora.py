"""Configuration of low-rank adapters (LoRA). Torch-free."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from rheostat.infra.config import Positive, Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import nearest_name
from rheostat.models.config.outline import ModelOutline


class LoraConfig(Settings):
    """Low-rank adapters that are trained instead of the model's weights (LoRA, arXiv 2106.09685). The model's weights
    are frozen."""

    rank: Positive = 16
    """Rank of each adapter: the number of columns of B and rows of A in the product B A."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the adapters. The product B A of an adapter's two matrices is multiplied by alpha / rank and added to
    the weight of its layer."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Layers that get an adapter: "all-linear" for all linear layers except the output layer, or a list of names. A
    name may be the full name of a layer or the end of it, such as `q_proj`."""

    def choose(self, layers: Iterable[str], *, kind: str) -> list[str]:
        """Return the linear layers of a model that get an adapter. `layers` contains the names of all of them.

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
        """Return the number of parameters that are trained: the adapters and, if the model has one, the classifier
        head."""
        return self.rank * sum(model.layers[name] for name in self.choose(model.layers, kind=model.kind)) + model.head


def _matches_target(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
