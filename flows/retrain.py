"""Flow for the scheduled retrain: a new run of the job each time, and the decision whether its policy becomes
champion."""

from datetime import date

from prefect import flow
from prefect.runtime import flow_run

from flows.endings import tell_endings
from flows.evaluation import evaluate
from flows.train import train
from tasks.config.run import RunConfig
from tasks.promotion.approval import approved
from tasks.promotion.draft import dated, draft_retrain
from tasks.promotion.gate import judge
from tasks.promotion.page import report_gate
from tasks.promotion.power import check_suites
from tasks.promotion.promote import Retrained, conclude, mirrored, recorded
from tasks.promotion.suites import contenders, opponent_of, suites_of


def _name() -> str:
    """Return the name of the day's run, for the flow run that Prefect is about to start."""
    given = flow_run.parameters
    return dated(given["config"], given["day"] or flow_run.scheduled_start_time).name


@flow(name="retrain", flow_run_name=_name, persist_result=True, result_serializer="json")
async def retrain(config: RunConfig, accept_change: bool = False, day: date | None = None) -> Retrained:
    """Train a policy as a run with the configured name and the scheduled day, such as `run-20261123`.

    With a registry, the run starts from the champion, trains on new problems, and is compared with the champion. The
    gate then decides whether its policy becomes champion. Started again on the same day, this flow continues the day's
    run. Later, `train` continues it by its full name. After a restart, possibly on another machine, finished work is
    found in the store and not in Prefect's results.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
        day: Day in the name of the run. The default is the scheduled day, in UTC.
    """
    tell_endings()
    config = dated(config, day or flow_run.scheduled_start_time)
    draft = draft_retrain(config)
    begun = draft.begin(config)
    if begun.promotion is None:
        return Retrained(trained=await train(begun, accept_change=accept_change))
    await check_suites(begun, config.policy)
    trained = await train.with_options(persist_result=False)(begun, accept_change=accept_change)
    while (record := recorded(begun)) is None:  # repeat if there is a new champion meanwhile
        opponent = opponent_of(begun)
        for suite in suites_of(begun):
            for side, policy in contenders(begun, opponent).items():
                await evaluate(suite.config(side, policy))
        await conclude(begun, draft, await judge(begun, opponent))
    await report_gate(begun, record)
    record = await approved(begun, record)
    await mirrored(begun)
    return Retrained(trained=trained, record=record)
