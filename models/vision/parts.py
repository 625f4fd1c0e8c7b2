"""The parts of a model that sees, by the names of its parameters and layers. Torch-free."""

from collections.abc import Iterable
from typing import Final, Literal

from infra.errors import BadInput

Part = Literal["vision", "projector", "language"]

_PROJECTOR: Final = ("connector.", "multi_modal_projector.", "visual.merger.", "visual.deepstack_merger_list.")
_VISION: Final = ("visual.", "vision_tower.", "vision_model.")


def part_of(name: str) -> Part:
    """Say which part of a model a parameter or layer belongs to."""
    inner = name.removeprefix("model.") + "."
    if inner.startswith(_PROJECTOR):
        return "projector"
    return "vision" if inner.startswith(_VISION) else "language"


def frozen_names(names: Iterable[str], freeze: Iterable[Part], *, kind: str) -> list[str]:
    """Choose the parameters that stay as they are. Raises BadInput where a part has none; `kind` is the model's."""
    parts = {name: part_of(name) for name in names}
    for part in freeze:
        if part not in parts.values():
            raise BadInput(f"update.freeze {part!r}: {kind} has no such part; expected language alone of a text model")
    return [name for name, part in parts.items() if part in freeze]
