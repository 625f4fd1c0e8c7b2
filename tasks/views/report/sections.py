"""Sections of a run's report as HTML. Each section contains only escaped plain text, tables and pictures."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from rheostat.infra.config import read_recorded
from rheostat.infra.costs import total
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.renamed import with_present_names
from rheostat.infra.store.dependencies import dependency_records
from rheostat.infra.store.registry import RegistryRecord, open_registry, registries
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.tombstones import tombstones
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.gate.comparison import PairedDifference, PairedScores, compare
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.lineage.trace import traced_rewards
from rheostat.tasks.promotion.evidence import problem_scores
from rheostat.tasks.run.batch import Batch, iterations_without_rollouts
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import SFT, StageKey, evaluation_key
from rheostat.tasks.tracking.points import chat_scalars
from rheostat.tasks.views.diagnosis import summarize_warnings
from rheostat.tasks.views.metrics import Accuracy
from rheostat.tasks.views.report.page import PageSection, paragraph, rows_table, toml
from rheostat.tasks.views.report.samples import spread
from rheostat.tasks.views.report.slots import PlacedDecision, SlotsPicture
from rheostat.tasks.views.runs import RunDescription

ALPHA: Final = 0.05
"""Significance level of each one-sided bound of a paired difference."""
DECISIONS: Final = 200
"""Maximum number of placement decisions listed. Longer lists are thinned out evenly."""
SEARCHED: Final = 20
"""Maximum number of iterations, from the newest on, in which the reasons for missing scores are counted."""
REASON: Final = 120
SHORT: Final = 16
"""Number of digits to which a digest is shortened."""


def verdict(run: Run, description: RunDescription, store: str) -> PageSection:
    """Return the first section of a report: held-out accuracy before and after training with a test of the difference,
    warnings, and the registry records of the run."""
    evaluations, cards = description.evaluations, list[tuple[str, str, str]]()
    if evaluations:
        before, after = evaluations[0], evaluations[-1]
        ends = [("before", before)] + ([("after", after)] if len(evaluations) > 1 else [])
        cards += [(f"held-out accuracy {name}", f"{each.mean:.3f}", _describe_accuracy(each)) for name, each in ends]
    if len(evaluations) > 1:
        cards.append(_difference_card(run, evaluations[0].number, evaluations[-1].number))
    cards += _chat_cards(run)
    cost = f"took {total(description.costs.values()).line()}" if description.costs else "no costs recorded"
    cards.append(("iterations", f"{len(description.iterations):,}", cost))
    tiles = "".join(
        f"<div>{escape(what)}<b>{escape(number)}</b><span class='quiet'>{escape(detail)}</span></div>"
        for what, number, detail in cards
    )
    lines = [
        f'<p class="warning">{escape(each)}</p>'
        for each in summarize_warnings([r.warnings for r in description.iterations])
    ]
    lines += [paragraph(_describe_record(name, record)) for name, record in _registry_records(run, store)]
    return PageSection(name="verdict", title="Verdict", body=f'<div class="verdict">{tiles}</div>{"".join(lines)}')


def _chat_cards(run: Run) -> list[tuple[str, str, str]]:
    """Return a card with the loss on held-out chats after the warm-up. Empty if there are no held-out chats."""
    trained = run.find(SFT)
    losses = {} if trained is None else chat_scalars(trained)
    if trained is None or len(losses) < 2:
        return []
    before, after = losses["warmup/heldout_loss_first"], losses["warmup/heldout_loss"]
    chats = f"{format_count(trained.metrics['heldout_chats'], 'chat')}, {before:.3f} before the warm-up"
    return [("loss on held-out chats", f"{after:.3f}", chats)]


def _describe_accuracy(accuracy: Accuracy) -> str:
    interval = (
        f"95% interval {accuracy.low:.3f} to {accuracy.high:.3f}, {accuracy.evaluation_text}{accuracy.pass_at_text}"
    )
    return f"after {format_count(accuracy.number, 'iteration')}, {interval}"


def _difference_card(run: Run, first: int, last: int) -> tuple[str, str, str]:
    try:
        difference = paired_difference(run, first, run, last)
    except (BadInput, Quarantined) as error:
        return "difference", "-", f"no paired test: {error}"
    return "difference", f"{difference.mean:+.3f}", difference_line(difference)


def paired_difference(one: Run, first: int, other: Run, last: int) -> PairedDifference:
    """Test whether the accuracy of two evaluations differs, by comparing them problem by problem on the first reward
    term.

    Raises BadInput if fewer than 30 problems were evaluated in both, or if rollouts were deleted. Raises Quarantined if
    missing scores leave fewer than 30 problems.
    """
    sides = []
    for run, number in ((one, first), (other, last)):
        term = read_recorded(ScoringConfig, run.record.config["scoring"]).terms[0]
        sides.append(problem_scores(Batch.read(run, evaluation_key(number)), [term])[term])
    return compare(PairedScores.of(*sides), alpha=ALPHA, seed=0)


def difference_line(difference: PairedDifference) -> str:
    """Describe a paired difference in one sentence: problems that got better or worse, bounds and p-value."""
    test = {"mcnemar": "McNemar's exact test", "wilcoxon": "Wilcoxon's signed ranks"}[difference.test]
    return (
        f"paired over {difference.prompts:,} problems: {difference.better:,} better, {difference.worse:,} worse; "
        f"one-sided 95% bounds {difference.lower:+.3f} and {difference.upper:+.3f}; {test}, p of no gain "
        f"{difference.p:.3g}"
    )


def _registry_records(run: Run, store: str) -> Iterator[tuple[str, RegistryRecord]]:
    for name in registries(store):
        for record in open_registry(store, name).records():
            if record.run == run.name:
                yield name, record


def _describe_record(name: str, record: RegistryRecord) -> str:
    return f"{name}@{record.number}: {record.kind} by {record.who}, {record.when}: {record.reason}"


def evaluations(description: RunDescription) -> str:
    """Return an HTML table with the accuracy of each held-out evaluation."""
    return rows_table(
        [
            {
                "after iteration": each.number,
                "mean": f"{each.mean:.3f}",
                "95% interval": f"{each.low:.3f} to {each.high:.3f}",
                "evaluated on": each.evaluation_text,
                **{f"pass@{k}": f"{share:.3f}" for k, share in each.pass_at.items()},
            }
            for each in description.evaluations
        ]
    )


def slots(pictures: Sequence[SlotsPicture], decisions: Sequence[PlacedDecision]) -> PageSection:
    """Return the report section about placement: diagrams of the worker slots over time, and a table of decisions."""
    figures_html = "".join(f'<figure class="wide"><h3>{each.batch}</h3>{each.svg}</figure>' for each in pictures)
    rows = [
        {
            "batch": each.batch,
            "moment": each.moment,
            "predicted s": f"{each.predicted_seconds:.1f}",
            "unchanged s": f"{each.unchanged_seconds:.1f}",
            "decision": each.reason,
        }
        for each in spread(decisions, DECISIONS)
    ]
    selection = "" if len(decisions) <= DECISIONS else f" ({DECISIONS} of {len(decisions):,}, spread evenly)"
    below = (
        f"<details><summary>decisions{selection}</summary>{rows_table(rows, words=True)}</details>"
        if rows
        else paragraph("Roles did not share workers, so there was no placement decision.")
    )
    hint = '<p class="quiet">Point at a bar (work of a worker) or at a dotted line (decision) for details.</p>'
    return PageSection(name="slots", title="Workers", body=f"{hint}{figures_html}{below}")


def costs(description: RunDescription) -> str:
    """Return an HTML table with the costs of each role and their sum."""
    rows = [{"cost of": role, **cost.cells()} for role, cost in description.costs.items()]
    rows += [{"cost of": "total", **total(description.costs.values()).cells()}] if rows else []
    return rows_table(rows)


def missing(run: Run, description: RunDescription) -> PageSection:
    """Return the section about missing scores and their reasons, discarded updates, rows of data that were left out,
    and deleted data."""
    numbers = [report.iteration for report in description.iterations if report.missing]
    num_missing = sum(report.missing for report in description.iterations)
    refused = [report.iteration for report in description.iterations if report.quarantined]
    lines = [
        paragraph(
            f"{format_count(num_missing, 'completion has', 'completions have')} no score, in "
            f"{format_count(len(numbers), 'iteration')}."
        )
    ]
    reasons = _count_reasons(run, numbers[-SEARCHED:])
    lines.append(rows_table([{"reason": each, "completions": count} for each, count in reasons], words=True))
    if refused:
        lines.append(
            paragraph(f"Updates discarded because of NaN or Inf, in iterations {', '.join(map(str, refused))}.")
        )
    if dropped := _count_dropped_rows(run):
        lines.append(paragraph("Rows of data files that were left out (`drop`):"))
        lines.append(rows_table(dropped, words=True))
    stones = [stone for stone in tombstones(run) if not stone.is_bundle]
    lines += [paragraph(f"{stone.what}: deleted by {stone.why} ({stone.who})") for stone in stones[-SEARCHED:]]
    return PageSection(name="missing", title="Missing scores and deletions", body="".join(lines))


DROPPED: Final = ("too_long", "empty", "dropped_too_long", "dropped_empty", "dropped_ties", "dropped_mismatched")
"""Metrics of prompts and of models trained on preferences that count the rows that were left out."""


def _count_dropped_rows(run: Run) -> list[dict[str, object]]:
    """Return a row for each result for which rows of data files were left out: its key, the reason and the number.
    Evaluations, iterations and rescorings are not searched, because they read no data files, and judges count blank
    completions there under the same names."""
    apart = ("it-", "eval-", "retention", "rescore", "recredit")
    counts = [
        (manifest.key, name.removeprefix("dropped_"), manifest.metrics.get(name, 0))
        for folder in run.folders()
        if not folder.startswith(apart)
        for manifest in run.manifests(f"{folder}/")
        if not StageKey.parse(manifest.key).is_evaluation
        for name in DROPPED
    ]
    return [{"result": key, "reason": reason, "rows": f"{count:,.0f}"} for key, reason, count in counts if count]


def _count_reasons(run: Run, numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Count why scores are missing in some iterations. Return (reason, number of completions), the most
    frequent first."""
    deleted, counts = iterations_without_rollouts(run, numbers), Counter[str]()
    for number in (number for number in numbers if number not in deleted):
        for manifest in Iteration(run, number).shard_manifests("scoring"):
            errors = read_shard(run.store, manifest.shards[0], ["error"])["error"].drop_null().to_pylist()
            counts.update(error[:REASON] for error in errors)
    return counts.most_common(SEARCHED)


def lineage(run: Run, description: RunDescription) -> PageSection:
    """Return the section that lists what the policy was made from, with digests: configuration, libraries, data,
    rewards and models."""
    records = dependency_records(run)
    created = f"created {description.created}"
    rows = [{"item": "configuration", "digest": description.fingerprint, "details": created}]
    for record in records:
        libraries = ", ".join(f"{name} {version}" for name, version in record.dependencies.libraries.items())
        rows.append({"item": f"from iteration {record.iteration} on", "digest": "", "details": libraries})
        for path, file in record.dependencies.data.items():
            rows.append({"item": f"data {path}", "digest": file.digest[:SHORT], "details": f"{file.bytes:,} bytes"})
    rows += [
        {"item": f"reward {reward.term}", "digest": "", "details": f"{reward.kind}, {reward.version}"}
        for reward in traced_rewards(run, records)
    ]
    for folder in run.folders():
        if not folder.startswith(("it-", "eval-", "retention")):
            for manifest in run.manifests(f"{folder}/"):
                parts = [f"{name} {bundle.digest[:SHORT]}" for name, bundle in manifest.bundles.items()]
                rows.append({"item": manifest.key, "digest": manifest.digest[:SHORT], "details": ", ".join(parts)})
    rows += [
        {"item": f"policy after iteration {report.iteration}", "digest": report.policy, "details": ""}
        for report in description.iterations[-1:]
    ]
    return PageSection(name="lineage", title="Origin of the policy", body=rows_table(rows, words=True))


def configuration(run: Run, description: RunDescription) -> PageSection:
    """Return the section with the run's configuration as TOML and a command that repeats the run."""
    config = {"iterations": len(description.iterations), **with_present_names(run.record.config, RunConfig)}
    file = f"{run.name}.toml"
    command = shlex.join(["rheostat", "train", file, "--run", f"{run.name}-again"])
    body = (
        f"<p>To repeat the run, save this configuration as <code>{escape(file)}</code> and run <code>{escape(command)}"
        "</code>. Pools, placement and budget are not included, because no result depends on them.</p>"
        f"<details><summary>{escape(file)}</summary><pre>{escape(toml(config))}</pre></details>"
    )
    return PageSection(name="configuration", title="Configuration", body=body)
