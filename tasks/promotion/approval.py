"""Approval of a proposed policy by a person, through a form that Prefect shows on the suspended flow run of the
retrain."""

import logging
from datetime import timedelta
from typing import Final, Literal

from prefect.context import FlowRunContext
from prefect.flow_runs import asuspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from rheostat.infra.store.registry import Registry, RegistryRecord, open_registry
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.events import emit_record
from rheostat.tasks.promotion.gate import GateResult
from rheostat.tasks.promotion.page import report_gate
from rheostat.tasks.promotion.registry import promote, refuse
from rheostat.tasks.promotion.suites import promotion_rules

logger = logging.getLogger(__name__)

FORM: Final = "approval"
"""Key of the form in Prefect. A flow run has at most one such form."""


class Approval(RunInput):
    """Form that a person fills in to approve or refuse the promotion of a policy."""

    approve: Literal["yes", "no"] = Field(description="Whether to promote the policy. A refusal is final.")
    reason: str = Field(min_length=1, description="Reason, which is stored in the registry's record.")
    name: str = Field(default="", description="Your name, because Prefect's server does not know it.")


async def await_approval(config: RunConfig, record: RegistryRecord) -> RegistryRecord:
    """Let a person approve or refuse a proposal, and return the resulting registry record.

    Returns `record` unchanged if it is no proposal, or if the flow run belongs to no deployment. Otherwise the flow run
    is suspended with a form. After the answer the flow starts again and reuses all stored results. The proposal can
    also be signed with `rheostat promote`, whether there is a form or not.

    Raises BadInput if the answer is too late, because the champion changed or the proposal was already signed or
    refused.
    """
    context, rules = FlowRunContext.get(), promotion_rules(config)
    assert context is not None and context.flow_run is not None
    flow_run, registry = context.flow_run, open_registry(config.store, rules.registry)
    is_asked = FORM in (flow_run.empirical_policy.pause_keys or ())
    if flow_run.deployment_id is None or not (is_asked or record.kind == "proposal"):
        return record
    form = Approval.with_initial_data(description=question(registry, record))
    seconds = int(timedelta(days=rules.approve_days).total_seconds())
    answer = await asuspend_flow_run(form, timeout=seconds, key=FORM)
    decide = promote if answer.approve == "yes" else refuse
    who = f"{answer.name or 'somebody'}, by the form of {flow_run.name}"
    result, is_new = decide(config.store, registry.name, record.run, reason=answer.reason, who=who)
    change = f"{result.kind} of {result.run}: {result.reason}" if is_new else "nothing changed"
    logger.info("registry %s, record %d: %s", registry.name, result.number, change)
    if is_new:
        emit_record(registry.name, result)
    await report_gate(config, result)
    return result


def question(registry: Registry, record: RegistryRecord) -> str:
    """Return the description above the form, in Markdown: the result of the comparison, the champion and the
    challenger."""
    others = {other.number: other for other in registry.records()}
    before = others.get(record.previous)
    champion = "none yet; the run's initial policy was used instead" if before is None else _describe(before)
    reasons = GateResult.model_validate(record.gate).reasons
    return "\n".join(
        [
            f"Should the policy of {record.run} become the champion of **{registry.name}**?\n",
            *(f"- {reason}" for reason in reasons),
            f"\nchampion: {champion}\n",
            f"challenger: {_describe(record)}",
        ]
    )


def _describe(record: RegistryRecord) -> str:
    return f"`{record.policy[:16]}` of run {record.run}, record {record.number}"
