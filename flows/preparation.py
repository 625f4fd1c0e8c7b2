"""Training before the first iteration: sub-flows for the policy and its reward models.

The flows that users start are in separate modules. On import Prefect creates a form of the whole configuration for each
flow, which takes a third of a second.
"""

from prefect import flow

from tasks.preparation import fine_tune, make_reward_model, prefer, train_reward_model
from tasks.run.session import RunRef, session_of


@flow(name="fine-tuning", flow_run_name="fine-tuning")
async def fine_tuning(run: RunRef) -> None:
    """Train the initial policy on worked examples."""
    await fine_tune(session_of(run))


@flow(name="preference-learning", flow_run_name="preference learning")
async def preference_learning(run: RunRef) -> None:
    """Train the policy on preferences after its warm-up."""
    await prefer(session_of(run))


@flow(name="reward-modelling", flow_run_name="reward modelling")
async def reward_modelling(run: RunRef) -> None:
    """Create and train every model behind a reward that runs in worker slots."""
    session = session_of(run)
    for term in session.settings.scoring.hosted_rewards:
        base = await make_reward_model(session, term)
        await train_reward_model(session, term, base)
