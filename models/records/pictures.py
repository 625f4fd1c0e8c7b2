"""Pictures that a policy drew, in media shards, with the states that it learns from.

Shapes: K learnt steps of a picture, D numbers of a state.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
import pyarrow as pa
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from models.records.schemas import MEDIA_SCHEMA

States = NDArray[np.float32]

STATES: Final = "states"

PICTURE_SCHEMA = MEDIA_SCHEMA.append(pa.field("prompt_row", pa.int32())).append(pa.field(STATES, pa.large_binary()))
"""As images of prompts; whose prompt it is; and states of the learnt steps in float32, (K + 1) x D in rows, empty where
nothing is learnt."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture as it was drawn."""

    encoded: bytes
    """A PNG file, which names its seed and the digest of its states: no two drawings have one name."""
    digest: str
    """BLAKE3 of that."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    states: States
    """What each learnt step began at, and what the last of them led to: (K + 1) x D."""


def picture_of(pixels_YXC: NDArray[np.uint8], states: States, *, seed: int) -> Picture:
    """Encode pixels as a PNG file that names what it was drawn from."""
    named, sink = PngInfo(), BytesIO()
    named.add_text("rheostat:seed", str(seed))
    named.add_text("rheostat:states", blake3(states.tobytes()).hexdigest())
    Image.fromarray(pixels_YXC).save(sink, "PNG", optimize=False, compress_level=6, pnginfo=named)
    encoded, (height, width, _) = sink.getvalue(), pixels_YXC.shape
    return Picture(encoded, blake3(encoded).hexdigest(), width, height, states)


def picture_table(drawn: Iterable[tuple[int, Picture]]) -> pa.Table:
    """Lay pictures out, each with the row of its prompt."""
    rows = [*drawn]
    pictures = [picture for _, picture in rows]
    columns = {
        "digest": [picture.digest for picture in pictures],
        "format": ["PNG"] * len(rows),
        "width": [picture.width for picture in pictures],
        "height": [picture.height for picture in pictures],
        "bytes": [picture.encoded for picture in pictures],
        "prompt_row": [row for row, _ in rows],
        STATES: [picture.states.astype("<f4").tobytes() for picture in pictures],
    }
    return pa.table(columns, schema=PICTURE_SCHEMA)


def states_of(encoded: memoryview, *, steps: int) -> States:
    """Read the states of so many learnt steps."""
    return np.frombuffer(encoded, "<f4").reshape(steps + 1, -1)
