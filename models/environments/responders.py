"""Interface of responders, which answer the turns of episodes with users' code or a model. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from infra.plugins import find_target
from infra.processes.episodes import EnvironmentStep, EpisodeRequest
from models.config.environments import EpisodeSettings
from models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """Answer of an environment to a turn, or the reason why it failed."""

    step: EnvironmentStep | None
    failure: str = ""
    seconds: float = 0.0
    """Seconds that the answer took. If answers were computed together, each has an equal share of the seconds."""


class Responder(Protocol):
    """Component that answers the turns of episodes. Several batches of episodes may call it at the same time."""

    @property
    def progress(self) -> int:
        """Counter that grows at least once with every answered turn."""

    def answer(self, asked: Sequence[EpisodeRequest], numbers: Sequence[int]) -> list[TurnAnswer]:
        """Answer the last turn of each episode.

        `asked` contains the problem and all turns of each episode, and `numbers` the episodes' numbers in the shard.

        Raises BadInput if the environment cannot be used, and WorkerLost if it was ended for an unknown external
        reason.
        """

    def end(self, episodes: Sequence[str], numbers: Sequence[int]) -> None:
        """Release what the responder keeps for episodes that are over, such as environment objects or replies."""

    def close(self) -> None:
        """Close the processes or the model."""


@runtime_checkable
class LocalModelResponder(Protocol):
    """Responder whose answers come from a model that is loaded in the rollout worker."""

    def load(self, directory: Path, model: ModelVersion) -> None:
        """Load the model in `directory`, whose files were already verified, unless it is loaded."""

    def sleep(self) -> None:
        """Release the memory of the model's weights. The model must be loaded again before the next call."""


class ResponderFactory(Protocol):
    """Class or function that creates the responder from the settings of an environment."""

    def __call__(self, settings: Any, /) -> Responder:  # noqa: ANN401 -- settings differ by kind
        """Create the responder. Raises BadInput if the environment cannot be used."""


def build_responder(settings: EpisodeSettings) -> Responder:
    """Create the responder for an environment. Raises BadInput if the environment cannot be used."""
    return cast(ResponderFactory, find_target(settings.responder, where=f"{settings.label!r}"))(settings)
