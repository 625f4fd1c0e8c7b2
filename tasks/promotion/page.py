"""Page in Prefect that shows whether a retrained policy may replace the champion, with all measurements."""

from collections.abc import Iterator, Mapping, Sequence

from prefect.artifacts import acreate_markdown_artifact

from rheostat.infra.store.registry import RegistryRecord
from rheostat.models.gate.comparison import PairedDifference
from rheostat.models.gate.verdict import Evidence, MeasuredFloor, MeasuredLimit
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.promotion.gate import GateResult
from rheostat.tasks.promotion.suites import promotion_rules
from rheostat.tasks.run.keys import artifact_key
from rheostat.tasks.run.stages import stage


@stage("gate page")
async def report_gate(config: RunConfig, record: RegistryRecord) -> None:
    """Publish the decision about a retrain with all measurements as the Prefect artifact `NAME-gate`."""
    registry = promotion_rules(config).registry
    title = f"registry {registry}, record {record.number}: {record.kind}"
    page = f"# {title[0].upper()}{title[1:]}\n\n{gate_page(record)}"
    await acreate_markdown_artifact(page, key=f"{artifact_key(record.run)}-gate", description=title)


def gate_page(record: RegistryRecord) -> str:
    """Return a Markdown page about a retrain: who decided what and why, the measured differences, and the suites."""
    gate = GateResult.model_validate(record.gate)
    against = f"record {gate.opponent}" if gate.opponent else "the run's initial policy"
    lines = [
        f"Run `{record.run}`, policy `{record.policy[:16]}`, compared with {against}.",
        f"By {record.who}, {record.when}: {record.reason}" if record.kind in ("promote", "refuse") else "",
        f"Verdict of the gate: {gate.verdict}",
        "\n".join(f"- {reason}" for reason in gate.reasons),
    ]
    if gate.evidence is not None:
        lines += [_rules_section(gate.evidence), _format_table([*_limit_rows(gate.evidence)])]
        lines.append(_format_table([*_suite_rows(gate, gate.evidence)]))
    return "\n\n".join(filter(None, lines))


def _rules_section(evidence: Evidence) -> str:
    rules = [(f"{gain.suite} > {gain.min_gain:g}", gain.difference) for gain in evidence.gains]
    rules += [(f"{guard.suite} > {-guard.margin:g}", guard.difference) for guard in evidence.guards]
    bounds = 100 * (1 - evidence.gains[0].difference.alpha)
    legend = f"Differences are challenger - champion. Each bound is one-sided, with a confidence of {bounds:g}%."
    return f"{legend}\n\n{_format_table([_rule_row(rule, difference) for rule, difference in rules])}"


def _rule_row(rule: str, difference: PairedDifference) -> dict[str, str]:
    return {
        "rule": rule,
        "champion": f"{difference.champion:.3f}",
        "challenger": f"{difference.challenger:.3f}",
        "difference": f"{difference.mean:+.3f}",
        "lower bound": f"{difference.lower:+.3f}",
        "upper bound": f"{difference.upper:+.3f}",
        "problems": f"{difference.prompts:,}",
        "better": f"{difference.better:,}",
        "worse": f"{difference.worse:,}",
        "missing": f"{difference.missing_share:.1%}",
        "test": difference.test,
        "p": f"{difference.p:.3g}",
    }


def _limit_rows(evidence: Evidence) -> Iterator[dict[str, str]]:
    measured: list[MeasuredLimit | MeasuredFloor] = [*evidence.limits, *evidence.floors]
    for each in measured:
        kept = "yes" if each.holds else "no"
        yield {"limit": each.name, "measured": f"{each.value:.4g}", "bound": each.bound, "satisfied": kept}


def _suite_rows(gate: GateResult, evidence: Evidence) -> Iterator[dict[str, str]]:
    for name, suite in gate.suites.items():
        yield {
            "suite": name,
            "problems trained on": f"{evidence.contaminated[name]:.1%}",
            "examples": ", ".join(evidence.trained_on[name].examples) if name in evidence.trained_on else "",
            "earlier gates": f"{suite.past}",
            "digest of the problems": f"`{suite.digest[:16]}`",
        }


def _format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a Markdown table, or an empty string if there are no rows."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
