"""The scheduled retrain: the main job, each time as a run of its own, and whether its policy is the next champion."""

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
    """The name of the day's run, for the flow run that Prefect is about to begin."""
    given = flow_run.parameters
    return dated(given["config"], given["day"] or flow_run.scheduled_start_time).name


@flow(name="retrain", flow_run_name=_name, persist_result=True, result_serializer="json")
async def retrain(config: RunConfig, accept_change: bool = False, day: date | None = None) -> Retrained:
    """Train a policy under the configured name and the day that the run is scheduled for, such as `run-20261123`.

    With a registry it begins as the champion, learns from problems that are new, is compared with the champion, and
    takes its place or not. Triggered again on the same day it continues that day's run; later, `train` continues it by
    its full name. Resumed, maybe on another machine, it finds what was done in the store, not among Prefect's results.

    Args:
        config: The run.
        accept_change: Go on although code of targets, data files or libraries are not those of the run.
        day: In whose name it is done; none takes the one that it is scheduled for, in UTC.
    """
    tell_endings()
    config = dated(config, day or flow_run.scheduled_start_time)
    draft = draft_retrain(config)
    begun = draft.begin(config)
    if begun.promotion is None:
        return Retrained(trained=await train(begun, accept_change=accept_change))
    await check_suites(begun, config.policy)
    trained = await train.with_options(persist_result=False)(begun, accept_change=accept_change)
    while (record := recorded(begun)) is None:  # again where another champion comes meanwhile
        opponent = opponent_of(begun)
        for suite in suites_of(begun):
            for side, policy in contenders(begun, opponent).items():
                await evaluate(suite.config(side, policy))
        await conclude(begun, draft, await judge(begun, opponent))
    await report_gate(begun, record)
    record = await approved(begun, record)
    await mirrored(begun)
    return Retrained(trained=trained, record=record)
