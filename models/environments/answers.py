"""What answers the turns of episodes: processes of users' code, or a model that plays the user. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from infra.plugins import find_target
from infra.processes.episodes import Asked, EnvironmentStep
from models.config.environments import EpisodeSettings
from models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class Answered:
    """What an environment said to a turn, or why it failed."""

    step: EnvironmentStep | None
    failure: str = ""
    seconds: float = 0.0
    """That it took; of an answer to several at once, its share."""


class Answering(Protocol):
    """Answers turns; several batches of episodes may ask at the same time."""

    @property
    def done(self) -> int:
        """Moves with every turn that is answered, or more often."""

    def answer(self, asked: Sequence[Asked], numbers: Sequence[int]) -> list[Answered]:
        """Have the last turn of each episode answered; `numbers` are those of the episodes.

        Raises BadInput where the environment cannot be used, and WorkerLost where that is nobody's fault.
        """

    def end(self, episodes: Sequence[str], numbers: Sequence[int]) -> None:
        """Let go of episodes that are over."""

    def close(self) -> None:
        """End whatever answers."""


@runtime_checkable
class HoldsModel(Protocol):
    """Answers with a model of the run's own."""

    def load(self, directory: Path, model: ModelVersion) -> None:
        """Take the model in `directory`, whose files were verified, unless it is the one that answers."""

    def sleep(self) -> None:
        """Give the memory of its weights back; who asks again loads it again."""


class MakesAnswering(Protocol):
    """Makes what answers of an environment's settings: its class, mostly."""

    def __call__(self, settings: Any, /) -> Answering:  # noqa: ANN401 -- its own settings
        """Raises BadInput where it cannot be used."""


def answering_of(settings: EpisodeSettings) -> Answering:
    """Make what answers. Raises BadInput where it cannot be used."""
    return cast(MakesAnswering, find_target(settings.answering, where=f"{settings.known_as!r}"))(settings)
