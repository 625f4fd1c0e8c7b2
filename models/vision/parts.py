"""Parts of a vision-language model (vision tower, projector, language model), determined from names of parameters and
layers.

This module does not import torch.
"""

from collections.abc import Iterable
from typing import Final, Literal

from rheostat.infra.errors import BadInput

Part = Literal["vision", "projector", "language"]

_PROJECTOR: Final = ("connector.", "multi_modal_projector.", "visual.merger.", "visual.deepstack_merger_list.")
_VISION: Final = ("visual.", "vision_tower.", "vision_model.")


def part_of(name: str) -> Part:
    """Return the part of a vision-language model (vision tower, projector or language model) that contains the
    parameter or layer with this name."""
    inner = name.removeprefix("model.") + "."
    if inner.startswith(_PROJECTOR):
        return "projector"
    return "vision" if inner.startswith(_VISION) else "language"


def frozen_names(names: Iterable[str], freeze: Iterable[Part], *, kind: str) -> list[str]:
    """Return the names of the parameters that are in one of the frozen parts of a vision-language model. `kind` is the
    model's class in messages. Raises BadInput if the model has no parameter in one of the parts."""
    parts = {name: part_of(name) for name in names}
    for part in freeze:
        if part not in parts.values():
            raise BadInput(
                f"update.freeze contains {part!r}, but {kind} has no such part. A text model has only 'language'. "
                "Remove it."
            )
    return [name for name, part in parts.items() if part in freeze]
