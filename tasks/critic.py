"""The first critic, where the algorithm has one."""

from prefect import task

from infra.store.manifests import Manifest
from models.config.algorithms import Ppo
from models.records.work import CriticWork
from tasks.plan import critic_key, policy_key
from tasks.session import RunRef, session_of
from tasks.stages import is_transient, once, required
from tasks.versions import policy_of


def has_critic(run: RunRef) -> bool:
    """Whether the run trains a critic beside its policy."""
    settings = session_of(run).settings
    return isinstance(settings.algorithm, Ppo) and settings.iterations > 0


@task(task_run_name="initial critic", retries=2, retry_condition_fn=is_transient)
async def make_critic(run: RunRef) -> Manifest:
    """Build the critic from the initial policy, or import the one that is configured."""
    algorithm = session_of(run).settings.algorithm
    assert isinstance(algorithm, Ppo), "only PPO has a critic"
    policy = required(run, policy_key(0))
    work = CriticWork(policy=policy_of(policy), critic=algorithm.critic)
    return await once(run, critic_key(0), role="preparation", method="make_critic", work=work, parents=[policy])
