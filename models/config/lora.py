"""Configuration of low-rank adapters (LoRA, rsLoRA and DoRA). Torch-free."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from rheostat.infra.config import Positive, Settings, Since
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
    rank_stabilized: Annotated[bool, Since("0.2.0", before=False)] = False
    """Whether the product B A is multiplied by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv 2312.03732).
    With alpha / rank, the gradients of adapters of high rank are small."""
    dora: Annotated[bool, Since("0.2.0", before=False)] = False
    """Whether to train DoRA adapters (arXiv 2402.09353, eq. 5), which also have a vector m with one magnitude for each
    output of a layer. Each row of the changed weight W + scale x B A is divided by its norm and multiplied by its
    magnitude. vLLM does not serve such adapters."""
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
        sizes = self._list_sizes(model)
        magnitudes = sum(outputs for _, outputs in sizes) if self.dora else 0
        return self.rank * sum(map(sum, sizes)) + magnitudes + model.head

    def count_kept(self, model: ModelOutline) -> int:
        """Return the count of numbers that the magnitudes of DoRA keep for each token until the backward pass, in all
        layers: the outputs of the base weight and those of B A. Other adapters return 0."""
        return 2 * sum(outputs for _, outputs in self._list_sizes(model)) if self.dora else 0

    def count_matrix(self, model: ModelOutline) -> int:
        """Return the largest count of numbers that DoRA needs for a short time to compute the row norms of one layer:
        B A, its multiple and the changed weight. Other adapters return 0."""
        return 3 * max(inputs * outputs for inputs, outputs in self._list_sizes(model)) if self.dora else 0

    def _list_sizes(self, model: ModelOutline) -> list[tuple[int, int]]:
        """Return the input size and output size of each layer that gets an adapter."""
        return [model.layers[name] for name in self.choose(model.layers, kind=model.kind)]


def _matches_target(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
