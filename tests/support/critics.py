"""Update workers with a critic."""

from dataclasses import replace
from functools import partial

from rheostat.models.config.algorithms import CriticConfig, Ppo
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from tests.support.update_workers import start_worker, update_work

ALGORITHM = Ppo(critic=CriticConfig(learning_rate=1e-2))
start_critic = partial(start_worker, algorithm=ALGORITHM)
"""Start an update worker that trains a critic next to the policy."""


def critic_work(uri: str, policy: ModelVersion, critic: ModelVersion, **changes) -> UpdateWork:
    """Return the work of an update on samples with values and returns; `changes` are other fields of the work."""
    work = update_work(uri, policy, critic=True)
    return replace(work, **{"iteration": policy.version + 1, "critic": critic} | changes)
