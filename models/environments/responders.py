"""Interface of responders, which answer the turns of episodes with users' code or a model. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from rheostat.infra.plugins import find_target
from rheostat.infra.processes.episodes import EnvironmentStep, EpisodeRequest
from rheostat.models.config.episodes import SteppedEnvironment
from rheostat.models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """Answer of an environment to a turn, or the reason why it failed."""

    step: EnvironmentStep | None
    failure: str = ""
    seconds: float = 0.0
    """Seconds that the answer took. If several answers were computed together, the seconds are divided equally among
    them."""


class Responder(Protocol):
    """Component that answers the policy's turns in episodes, by an environment or a model. Several threads may call it
    at the same time for different episodes."""

    @property
    def progress(self) -> int:
        """Counter that grows at least once with every answered turn, so that a stuck worker can be detected."""

    def answer(self, asked: Sequence[EpisodeRequest], numbers: Sequence[int]) -> list[TurnAnswer]:
        """Answer the last turn of each episode. `asked` contains the problem and all turns of each episode, and
        `numbers` the number of each episode within the rollout shard.

        Raises BadInput if the environment cannot be used, and WorkerLost if its process was ended from outside for an
        unknown reason.
        """

    def end(self, episodes: Sequence[str], numbers: Sequence[int]) -> None:
        """Release the state of episodes that are over, such as environment objects or stored replies. `numbers` are the
        episodes' numbers within the rollout shard."""

    def close(self) -> None:
        """End the processes, or close the model, that answer turns."""


@runtime_checkable
class LocalModelResponder(Protocol):
    """Responder that answers with a model loaded in the rollout worker."""

    def load(self, directory: Path, model: ModelVersion) -> None:
        """Load the model from `directory`, unless it is already loaded. The files were verified before."""

    def sleep(self) -> None:
        """Release the GPU memory of the model's weights. The model must be loaded again before the next answer."""


class ResponderFactory(Protocol):
    """Class or function that creates the component that answers turns from the settings of an environment."""

    def __call__(self, settings: Any, /) -> Responder:  # noqa: ANN401 -- settings differ by kind
        """Create the responder. Raises BadInput if the environment cannot be used."""


def build_responder(settings: SteppedEnvironment) -> Responder:
    """Create the component that answers turns in the configured environment. Raises BadInput if the environment cannot
    be used."""
    return cast(ResponderFactory, find_target(settings.responder, where=f"{settings.label!r}"))(settings)
