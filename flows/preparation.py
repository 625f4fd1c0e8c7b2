"""Training before the first iteration, as sub-flows for the policy and for reward models.

The flows that users start are in separate modules. On import Prefect creates a form of the whole configuration for each
flow, which takes a third of a second.
"""

from prefect import flow

from rheostat.tasks.preparation import (
    fine_tune_policy,
    make_reward_model,
    train_policy_on_preferences,
    train_reward_model,
)
from rheostat.tasks.run.open_run import RunRef, get_open_run


@flow(name="fine-tuning", flow_run_name="fine-tuning")
async def run_fine_tuning(run: RunRef) -> None:
    """Train the initial policy on example completions with supervised learning, before reinforcement learning."""
    await fine_tune_policy(get_open_run(run))


@flow(name="preference-learning", flow_run_name="preference learning")
async def run_preference_training(run: RunRef) -> None:
    """Train the policy on pairs of better and worse completions. If the run also has supervised warm-up, this comes
    after it."""
    await train_policy_on_preferences(get_open_run(run))


@flow(name="reward-modelling", flow_run_name="reward modelling")
async def train_reward_models(run: RunRef) -> None:
    """Build or copy the model of each reward that a model in a worker slot computes, and train the models that the
    configuration says to train."""
    open_run = get_open_run(run)
    for term in open_run.settings.scoring.hosted_rewards:
        base = await make_reward_model(open_run, term)
        await train_reward_model(open_run, term, base)
