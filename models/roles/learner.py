"""A model that is trained iteration by iteration: it stands at a published version, or is loaded there."""

import logging
from collections.abc import Callable
from dataclasses import replace

from infra.store.bundles import fetch_bundle
from infra.store.storage import Store
from models.objectives.config import UpdateConfig
from models.records import PolicyVersion
from models.roles.optimizer_state import load_state
from models.roles.publishing import publish_policy
from models.roles.ranks import Ranks, any_rank
from models.roles.token_module import TokenModule
from models.roles.trainer import Trainer

logger = logging.getLogger(__name__)

Build = Callable[[PolicyVersion], TokenModule]
"""Loads the verified weights of a version."""


class Learner:
    """Keeps one trainer hot between iterations; every rank holds one and they act together.

    Whether it was hot or is loaded anew, the same version gives the same trainer, bit for bit.
    """

    def __init__(self, store: Store, build: Build, config: UpdateConfig, *, ranks: Ranks) -> None:
        self._store = store
        self._build = build
        self._config = config
        self._ranks = ranks
        self._trainer: Trainer | None = None
        self._at: PolicyVersion | None = None

    def stand_at(self, version: PolicyVersion) -> Trainer:
        """Return a trainer at the version, loading it on every rank unless every rank is there; it counts as left."""
        hot = self._trainer is not None and self._at is not None and _same_model(self._at, version)
        self._at = None
        if any_rank(not hot, self._ranks):
            trainer = self.begin_at(version)
            if version.state is not None:
                load_state(trainer, fetch_bundle(self._store, version.state), update=self._config, ranks=self._ranks)
            return trainer
        assert self._trainer is not None
        return self._trainer

    def asked_at(self, version: PolicyVersion) -> Trainer:
        """Return a trainer at the version that is only asked and learns nothing, so that it stays there."""
        trainer = self.stand_at(version)
        self._at = version
        return trainer

    def begin_at(self, version: PolicyVersion) -> Trainer:
        """Return a trainer with the version's weights and a fresh optimizer."""
        self.close()
        self._trainer = Trainer(self._build(version), self._config, ranks=self._ranks)
        logger.info("loaded %s", version.digest)
        return self._trainer

    def publish(self, parent: PolicyVersion, *, version: int, with_state: bool = True) -> PolicyVersion:
        """Publish what was learnt since `parent`; without state the next update starts a fresh optimizer."""
        assert self._trainer is not None, "publish before stand_at"
        published = publish_policy(
            self._store,
            self._trainer,
            version=version,
            parent=parent,
            state_of=self._config if with_state else None,
            ranks=self._ranks,
        )
        self._at = published
        return published

    def close(self) -> None:
        """Give the memory back."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = self._at = None


def _same_model(one: PolicyVersion, other: PolicyVersion) -> bool:
    """Whether only the count of updates differs, as after one that was discarded."""
    return replace(one, version=other.version) == other
