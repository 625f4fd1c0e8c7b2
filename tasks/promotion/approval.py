"""Approval of a proposal by a person, through a form on the suspended flow run of a deployed retrain."""

import logging
from datetime import timedelta
from typing import Final, Literal

from prefect.context import FlowRunContext
from prefect.flow_runs import asuspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from infra.store.registry import Registry, RegistryRecord, open_registry
from tasks.config.run import RunConfig
from tasks.events import emit_record
from tasks.promotion.gate import GateResult
from tasks.promotion.page import report_gate
from tasks.promotion.registry import promote, refuse
from tasks.promotion.suites import rules_of

logger = logging.getLogger(__name__)

FORM: Final = "approval"
"""Key of the form in Prefect. A flow run has at most one such form."""


class Approval(RunInput):
    """Answer of a person to the question whether a proposed policy becomes the champion."""

    approve: Literal["yes", "no"] = Field(description="Whether it is promoted; a refused proposal stays refused.")
    reason: str = Field(min_length=1, description="Why, for who reads the records later.")
    name: str = Field(default="", description="Who you are: Prefect's server does not know.")


async def approved(config: RunConfig, record: RegistryRecord) -> RegistryRecord:
    """Let a person approve or refuse a proposal, and return the resulting registry record.

    Returns `record` itself if it is no proposal, or if the flow run belongs to no deployment. The flow run is suspended
    with a form. After the answer it starts again and reuses all stored results. `rheostat promote` can always sign the
    proposal too, with or without a form.

    Raises BadInput if the answer is too late, because the champion changed or the proposal was already signed or
    refused.
    """
    context, rules = FlowRunContext.get(), rules_of(config)
    assert context is not None and context.flow_run is not None
    flow_run, registry = context.flow_run, open_registry(config.store, rules.registry)
    is_asked = FORM in (flow_run.empirical_policy.pause_keys or ())
    if flow_run.deployment_id is None or not (is_asked or record.kind == "proposal"):
        return record
    form = Approval.with_initial_data(description=question(registry, record))
    seconds = int(timedelta(days=rules.approve_days).total_seconds())
    answer = await asuspend_flow_run(form, timeout=seconds, key=FORM)
    settle = promote if answer.approve == "yes" else refuse
    who = f"{answer.name or 'somebody'}, by the form of {flow_run.name}"
    settled, is_new = settle(config.store, registry.name, record.run, reason=answer.reason, who=who)
    said = f"{settled.kind} of {settled.run}: {settled.reason}" if is_new else "it is so already"
    logger.info("registry %s, record %d: %s", registry.name, settled.number, said)
    if is_new:
        emit_record(registry.name, settled)
    await report_gate(config, settled)
    return settled


def question(registry: Registry, record: RegistryRecord) -> str:
    """Return the text of the form in Markdown: the reasons of the gate and the two policies."""
    others = {other.number: other for other in registry.records()}
    before = others.get(record.previous)
    champion = "none yet; the run's first policy stood in for it" if before is None else _named(before)
    reasons = GateResult.model_validate(record.gate).reasons
    return "\n".join(
        [
            f"Is the policy of {record.run} the next champion of **{registry.name}**?\n",
            *(f"- {reason}" for reason in reasons),
            f"\nchampion: {champion}\n",
            f"challenger: {_named(record)}",
        ]
    )


def _named(record: RegistryRecord) -> str:
    return f"`{record.policy[:16]}` of run {record.run}, record {record.number}"
