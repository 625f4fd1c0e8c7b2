"""Update workers with a critic."""

from dataclasses import replace

from models.config.algorithms import CriticConfig, Ppo
from models.config.objectives import UpdateConfig
from models.records.versions import ModelVersion
from models.records.work import UpdateWork
from models.workers.update import UpdateWorker
from tests.support.training import write_samples
from tests.support.update_workers import CONFIG, free_port

ALGORITHM = Ppo(critic=CriticConfig(learning_rate=1e-2))


def start(
    uri: str, config: UpdateConfig = CONFIG, *, algorithm: Ppo = ALGORITHM, rank: int = 0, ranks: int = 1, port: int = 0
) -> UpdateWorker:
    worker = UpdateWorker(uri, "run", update=config, algorithm=algorithm, temperature=0.9, threads=1)
    worker.join(rank, ranks, "127.0.0.1", port or free_port())
    return worker


def learn(uri: str, policy: ModelVersion, critic: ModelVersion, **changes) -> UpdateWork:
    shard = write_samples(f"{uri}/run", seed=policy.version, critic=True)
    work = UpdateWork(
        iteration=policy.version + 1,
        policy=policy,
        reference=policy,
        samples=(shard,),
        total_iterations=3,
        seed=policy.version,
        critic=critic,
        kl_coefficient=0.1,
    )
    return replace(work, **changes)
