"""Sections of a run's report as HTML. Each section contains only escaped plain text, tables and pictures."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from infra.config import read_recorded
from infra.costs import total
from infra.errors import BadInput, Quarantined
from infra.store.dependencies import dependency_records
from infra.store.registry import RegistryRecord, open_registry, registries
from infra.store.runs import Run
from infra.store.shards import read_shard
from infra.store.tombstones import tombstones
from models.config.rewards import ScoringConfig
from models.gate.comparison import PairedDifference, PairedScores, compare
from tasks.lineage.trace import traced_rewards
from tasks.promotion.evidence import problem_scores
from tasks.run.batch import Batch, without_rollouts
from tasks.run.iteration import Iteration
from tasks.run.keys import evaluation_key
from tasks.views.diagnosis import summed_up
from tasks.views.metrics import Accuracy
from tasks.views.report.page import PageSection, paragraph, rows_table, toml
from tasks.views.report.samples import spread
from tasks.views.report.slots import PlacedDecision, SlotsPicture
from tasks.views.runs import RunDescription

ALPHA: Final = 0.05
"""Significance level of each one-sided bound of a paired difference."""
DECISIONS: Final = 200
"""Maximum number of placement decisions listed. Longer lists are thinned out evenly."""
SEARCHED: Final = 20
"""Number of iterations with missing scores whose reasons are counted, starting from the newest."""
REASON: Final = 120
SHORT: Final = 16
"""Number of digits that are shown of a digest."""


def verdict(run: Run, description: RunDescription, store: str) -> PageSection:
    """Return the section with held-out accuracy before and after, the paired test, warnings, and registry records of
    the run."""
    evaluations, cards = description.evaluations, list[tuple[str, str, str]]()
    if evaluations:
        before, after = evaluations[0], evaluations[-1]
        ends = [("before", before)] + ([("after", after)] if len(evaluations) > 1 else [])
        cards += [(f"held-out accuracy {name}", f"{each.mean:.3f}", _told(each)) for name, each in ends]
    if len(evaluations) > 1:
        cards.append(_difference_card(run, evaluations[0].number, evaluations[-1].number))
    took = total(description.costs.values()).line() if description.costs else "nothing was counted"
    cards.append(("iterations", f"{len(description.iterations):,}", f"took {took}"))
    tiles = "".join(
        f"<div>{escape(what)}<b>{escape(number)}</b><span class='quiet'>{escape(told)}</span></div>"
        for what, number, told in cards
    )
    lines = [
        f'<p class="warning">{escape(each)}</p>' for each in summed_up([r.warnings for r in description.iterations])
    ]
    lines += [paragraph(_recorded(name, record)) for name, record in _records(run, store)]
    return PageSection(name="verdict", title="Verdict", body=f'<div class="verdict">{tiles}</div>{"".join(lines)}')


def _told(accuracy: Accuracy) -> str:
    interval = f"95% interval {accuracy.low:.3f} to {accuracy.high:.3f}, {accuracy.asked}{accuracy.passed}"
    return f"after {accuracy.number} iterations, {interval}"


def _difference_card(run: Run, first: int, last: int) -> tuple[str, str, str]:
    try:
        found = paired_difference(run, first, run, last)
    except (BadInput, Quarantined) as error:
        return "difference", "-", f"no paired test: {error}"
    return "difference", f"{found.mean:+.3f}", difference_line(found)


def paired_difference(one: Run, first: int, other: Run, last: int) -> PairedDifference:
    """Compare two evaluations problem by problem, on the first reward term of each run.

    Raises BadInput if fewer than 30 problems were evaluated in both, or if rollouts were deleted. Raises Quarantined if
    missing scores leave fewer than 30 problems.
    """
    sides = []
    for run, number in ((one, first), (other, last)):
        term = read_recorded(ScoringConfig, run.record.config["scoring"]).terms[0]
        sides.append(problem_scores(Batch.read(run, evaluation_key(number)), [term])[term])
    return compare(PairedScores.of(*sides), alpha=ALPHA, seed=0)


def difference_line(found: PairedDifference) -> str:
    """Return a paired difference as one sentence."""
    test = {"mcnemar": "McNemar's exact test", "wilcoxon": "Wilcoxon's signed ranks"}[found.test]
    return (
        f"paired over {found.prompts:,} problems: {found.better:,} better, {found.worse:,} worse; "
        f"one-sided 95% bounds {found.lower:+.3f} and {found.upper:+.3f}; {test}, p of no gain {found.p:.3g}"
    )


def _records(run: Run, store: str) -> Iterator[tuple[str, RegistryRecord]]:
    for name in registries(store):
        for record in open_registry(store, name).records():
            if record.run == run.name:
                yield name, record


def _recorded(name: str, record: RegistryRecord) -> str:
    return f"{name}@{record.number}: {record.kind} by {record.who}, {record.when}: {record.reason}"


def evaluations(description: RunDescription) -> str:
    """Return the HTML table of all held-out evaluations."""
    return rows_table(
        [
            {
                "after iteration": each.number,
                "mean": f"{each.mean:.3f}",
                "95% interval": f"{each.low:.3f} to {each.high:.3f}",
                "asked": each.asked,
                **{f"pass@{k}": f"{share:.3f}" for k, share in each.pass_at.items()},
            }
            for each in description.evaluations
        ]
    )


def slots(pictures: Sequence[SlotsPicture], decisions: Sequence[PlacedDecision]) -> PageSection:
    """Return the section with the pictures of some iterations' workers and the list of placement decisions."""
    drawn = "".join(f'<figure class="wide"><h3>{each.batch}</h3>{each.svg}</figure>' for each in pictures)
    told = [
        {
            "batch": each.batch,
            "moment": each.moment,
            "predicted s": f"{each.predicted_seconds:.1f}",
            "unchanged s": f"{each.unchanged_seconds:.1f}",
            "decision": each.reason,
        }
        for each in spread(decisions, DECISIONS)
    ]
    shown = "" if len(decisions) <= DECISIONS else f" ({DECISIONS} of {len(decisions):,}, spread evenly)"
    below = (
        f"<details><summary>decisions{shown}</summary>{rows_table(told, words=True)}</details>"
        if told
        else paragraph("No role competed for the workers: there was nothing to decide.")
    )
    hint = '<p class="quiet">Point at a piece of work, or at a dotted line, for what it was and why.</p>'
    return PageSection(name="slots", title="Workers", body=f"{hint}{drawn}{below}")


def costs(description: RunDescription) -> str:
    """Return the HTML table of the costs by role, with their total."""
    rows = [{"took": role, **cost.cells()} for role, cost in description.costs.items()]
    rows += [{"took": "in all", **total(description.costs.values()).cells()}] if rows else []
    return rows_table(rows)


def missing(run: Run, description: RunDescription) -> PageSection:
    """Return the section on missing scores with their reasons, refused updates, and deletions."""
    numbers = [report.iteration for report in description.iterations if report.missing]
    lost = sum(report.missing for report in description.iterations)
    refused = [report.iteration for report in description.iterations if report.quarantined]
    lines = [paragraph(f"{lost:,} completions have no score, in {len(numbers):,} iterations.")]
    reasons = _reasons(run, numbers[-SEARCHED:])
    lines.append(rows_table([{"reason": each, "completions": count} for each, count in reasons], words=True))
    if refused:
        lines.append(paragraph(f"Updates refused because of NaN or Inf, by iteration: {', '.join(map(str, refused))}."))
    stones = [stone for stone in tombstones(run) if not stone.is_bundle]
    lines += [paragraph(f"{stone.what}: deleted by {stone.why} ({stone.who})") for stone in stones[-SEARCHED:]]
    return PageSection(name="missing", title="What went missing", body="".join(lines))


def _reasons(run: Run, numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Count the reasons for missing scores in some iterations. The most frequent reason comes first."""
    gone, found = without_rollouts(run, numbers), Counter[str]()
    for number in (number for number in numbers if number not in gone):
        for made in Iteration(run, number).stage("scoring"):
            errors = read_shard(run.store, made.shards[0], ["error"])["error"].drop_null().to_pylist()
            found.update(error[:REASON] for error in errors)
    return found.most_common(SEARCHED)


def lineage(run: Run, description: RunDescription) -> PageSection:
    """Return the section with the digests of everything that the policy was made from."""
    records = dependency_records(run)
    rows = [{"what": "configuration", "digest": description.fingerprint, "told": f"made {description.created}"}]
    for record in records:
        libraries = ", ".join(f"{name} {version}" for name, version in record.dependencies.libraries.items())
        rows.append({"what": f"from iteration {record.iteration} on", "digest": "", "told": libraries})
        for path, file in record.dependencies.data.items():
            rows.append({"what": f"data {path}", "digest": file.digest[:SHORT], "told": f"{file.bytes:,} bytes"})
    rows += [
        {"what": f"reward {reward.term}", "digest": "", "told": f"{reward.kind}, {reward.version}"}
        for reward in traced_rewards(run, records)
    ]
    for folder in run.folders():
        if not folder.startswith(("it-", "eval-", "retention")):
            for made in run.manifests(f"{folder}/"):
                parts = [f"{name} {bundle.digest[:SHORT]}" for name, bundle in made.bundles.items()]
                rows.append({"what": made.key, "digest": made.digest[:SHORT], "told": ", ".join(parts)})
    rows += [
        {"what": f"policy after iteration {report.iteration}", "digest": report.policy, "told": ""}
        for report in description.iterations[-1:]
    ]
    return PageSection(name="lineage", title="Where the policy comes from", body=rows_table(rows, words=True))


def configuration(run: Run, description: RunDescription) -> PageSection:
    """Return the section with the run's configuration as TOML and the command that repeats the run."""
    config = {"iterations": len(description.iterations), **run.record.config}
    file = f"{run.name}.toml"
    command = shlex.join(["rheostat", "train", file, "--run", f"{run.name}-again"])
    body = (
        f"<p>As <code>{escape(file)}</code>, this repeats the run: <code>{escape(command)}</code>. Pools, "
        "placement and budget are those of whoever repeats it: no result depends on them.</p>"
        f"<details><summary>{escape(file)}</summary><pre>{escape(toml(config))}</pre></details>"
    )
    return PageSection(name="configuration", title="Configuration", body=body)
