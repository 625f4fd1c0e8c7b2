"""What a policy and its judges learn before the first iteration, each a sub-flow of whoever prepares a run.

The flows that people start are in modules of their own: Prefect makes a form of each one's whole configuration when it
is imported, in a third of a second.
"""

from prefect import flow

from tasks.preparation import fine_tune, make_reward_model, prefer, train_reward_model
from tasks.run.session import RunRef, session_of


@flow(name="fine-tuning", flow_run_name="fine-tuning")
async def fine_tuning(run: RunRef) -> None:
    """Train the policy that was made on worked examples."""
    await fine_tune(session_of(run))


@flow(name="preference-learning", flow_run_name="preference learning")
async def preference_learning(run: RunRef) -> None:
    """Train the policy on preferences, from where its warm-up left it."""
    await prefer(session_of(run))


@flow(name="reward-modelling", flow_run_name="reward modelling")
async def reward_modelling(run: RunRef) -> None:
    """Make and train every model that scores completions here."""
    session = session_of(run)
    for term in session.settings.scoring.hosted_rewards:
        made = await make_reward_model(session, term)
        await train_reward_model(session, term, made)
