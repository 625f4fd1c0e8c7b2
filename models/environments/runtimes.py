"""Interface of the object that runs the episodes of a rollout worker. Does not import torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rheostat.infra.plugins import find_target
from rheostat.infra.store.contracts import Objects
from rheostat.models.config.episodes import EpisodeSettings
from rheostat.models.engines.protocol import Engine
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import RolloutWork
from rheostat.models.rollouts.groups import Group


class EpisodeRuntime(Protocol):
    """Object that runs the episodes of rollout shards in a rollout worker."""

    @property
    def progress(self) -> int:
        """Counter that grows while episodes advance without the engine. A worker whose counters stop growing is
        considered stuck."""

    def load(self, directory: Path, user: ModelVersion, /) -> None:
        """Load the model `user`, which plays the user in dialogues. Raises BadInput if the environment uses no model in
        this process."""

    def run_episodes(
        self, groups: Sequence[Group], engine: Engine, work: RolloutWork, *, directory: Path, store: Objects
    ) -> list[Group]:
        """Run each unfinished completion of the groups as an episode, and return the groups with the resulting
        completions. `directory` contains the policy's tokenizer, and `store` is the store of the run."""

    def pop_times(self) -> dict[str, float]:
        """Return seconds of the episodes since the last call, by the name of the metric."""

    def sleep(self) -> None:
        """Release GPU memory until the next episodes."""

    def close(self) -> None:
        """End the processes of the environment, and release its models."""


class RuntimeFactory(Protocol):
    """Class or function that creates the runtime of an environment from its settings."""

    def __call__(self, settings: Any, /) -> EpisodeRuntime:  # noqa: ANN401 -- settings differ by kind
        """Create the runtime. Raises BadInput if the environment cannot be used."""


def build_runtime(settings: EpisodeSettings) -> EpisodeRuntime:
    """Create the object that runs the episodes of a configured environment. Raises BadInput if the environment cannot
    be used."""
    return cast(RuntimeFactory, find_target(settings.runtime_factory, where=f"{settings.label!r}"))(settings)
