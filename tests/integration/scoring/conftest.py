"""The store of a run and scoring workers, closed after each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rheostat.infra.store.contracts import Store
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import AlgorithmConfig, DrGrpo
from rheostat.models.config.reward_terms import TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.workers.scoring import ScoringWorker

MakeScoringWorker = Callable[..., ScoringWorker]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"{tmp_path}/run")


@pytest.fixture
def make_worker(tmp_path: Path) -> Iterator[MakeScoringWorker]:
    """Function that creates a scoring worker with these rewards. Without rewards, the completion states its reward."""
    workers: list[ScoringWorker] = []
    obedient = TargetReward(name="obedient", target="tests.support.rewards:obedient")

    def make(
        *rewards: object, algorithm: AlgorithmConfig | None = None, home: Path = tmp_path, **settings: object
    ) -> ScoringWorker:
        scoring = ScoringConfig(rewards=rewards or (obedient,), **settings)
        workers.append(ScoringWorker(str(home), "run", scoring, algorithm or DrGrpo()))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def worker(make_worker: MakeScoringWorker) -> ScoringWorker:
    """Worker whose reward is the number that the completion states."""
    return make_worker()
