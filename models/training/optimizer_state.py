"""The optimizer's state as files: one safetensors file per rank, and a JSON file that says whose they are.

Rank 0 writes all of them, one rank's after another, so no shared disk is needed; every rank reads its own.
"""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from infra.config import Settings
from infra.errors import BadInput, Damaged
from infra.store.checksums import canonical_json
from models.config.objectives import UpdateConfig
from models.training.ranks import Ranks, gather_bytes
from models.training.trainer import Trainer, zero_stage

_LAYOUT = "state.json"


class StateLayout(Settings):
    """How the state was spread; only ranks that are spread alike can continue with it."""

    world_size: int
    """Ranks that shared it."""
    zero_stage: int
    """DeepSpeed's stage."""
    dtype: str
    """Precision of the weights."""


def save_state(trainer: Trainer, directory: Path, *, update: UpdateConfig, ranks: Ranks) -> None:
    """Write every rank's state into a directory of rank 0."""
    moments = {name: value.detach().cpu().contiguous() for name, value in trainer.moments().items()}
    for rank, data in enumerate(gather_bytes(save(moments), ranks)):
        (directory / _file_name(rank)).write_bytes(data)
    if ranks.rank == 0:
        (directory / _LAYOUT).write_bytes(canonical_json(_layout(update, ranks).model_dump()))


def load_state(trainer: Trainer, directory: Path, *, update: UpdateConfig, ranks: Ranks) -> None:
    """Continue with this rank's state from a verified directory; no pickle is ever read."""
    expected = _layout(update, ranks)
    found = json.loads((directory / _LAYOUT).read_text())
    if found != expected.model_dump():
        raise BadInput(f"optimizer state {directory.name}: expected {expected.model_dump()}, found {found}")
    try:
        moments = load_file(directory / _file_name(ranks.rank))
    except SafetensorError as error:
        raise Damaged(f"optimizer state {directory.name}, rank {ranks.rank}: {error}") from error
    trainer.load_moments(moments)


def _layout(update: UpdateConfig, ranks: Ranks) -> StateLayout:
    return StateLayout(world_size=ranks.world_size, zero_stage=zero_stage(update), dtype=update.dtype)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
