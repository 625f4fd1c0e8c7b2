"""Flow for scheduled retraining. Each retrain is a new run of the job, followed by the decision whether its policy
becomes the champion."""

from datetime import date

from prefect import flow
from prefect.runtime import flow_run

from rheostat.flows.evaluation import evaluate
from rheostat.flows.prefect_states import install_state_handling
from rheostat.flows.train import train
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.promotion.approval import await_approval
from rheostat.tasks.promotion.draft import draft_retrain, with_date
from rheostat.tasks.promotion.gate import run_gate
from rheostat.tasks.promotion.page import report_gate
from rheostat.tasks.promotion.power import check_suites
from rheostat.tasks.promotion.promote import Retrained, find_verdict, record_verdict, sync_mirror
from rheostat.tasks.promotion.suites import find_opponent, policies_to_compare, suites_of


def _build_name() -> str:
    """Return the name of the retrain's run: the configured name and the scheduled day, such as `run-20261123`. Prefect
    uses this name for the flow run."""
    parameters = flow_run.parameters
    return with_date(parameters["config"], parameters["day"] or flow_run.scheduled_start_time).name


@flow(name="retrain", flow_run_name=_build_name, persist_result=True, result_serializer="json")
async def retrain(config: RunConfig, accept_change: bool = False, day: date | None = None) -> Retrained:
    """Train a policy as a run with the configured name and the scheduled day, such as `run-20261123`. If a registry is
    configured, the run starts from the champion, trains on new problems, and is compared with the champion. The
    promotion gate then decides whether the new policy becomes the champion.

    If the flow is started again on the same day, it continues the day's run. Later, `train` continues the run by its
    full name. After a restart, possibly on another machine, finished work is found in the store and not in Prefect's
    results.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
        day: Day in the name of the run. The default is the scheduled day, in UTC.
    """
    install_state_handling()
    config = with_date(config, day or flow_run.scheduled_start_time)
    draft = draft_retrain(config)
    run_config = draft.start_config(config)
    if run_config.promotion is None:
        return Retrained(trained=await train(run_config, accept_change=accept_change))
    await check_suites(run_config, config.policy)
    trained = await train.with_options(persist_result=False)(run_config, accept_change=accept_change)
    while (record := find_verdict(run_config)) is None:  # repeat if there is a new champion meanwhile
        opponent = find_opponent(run_config)
        for suite in suites_of(run_config):
            for side, policy in policies_to_compare(run_config, opponent).items():
                with suite.naming_its_keys():
                    await evaluate(suite.config(side, policy))
        await record_verdict(run_config, draft, await run_gate(run_config, opponent))
    await report_gate(run_config, record)
    record = await await_approval(run_config, record)
    await sync_mirror(run_config)
    return Retrained(trained=trained, record=record)
