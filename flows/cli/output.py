"""Tables and texts that commands print, such as the metrics of a run or its rollouts."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from rheostat.infra.costs import Cost, total
from rheostat.infra.counts import format_count
from rheostat.infra.store.tombstones import WHOLE_RUN, Tombstone
from rheostat.infra.terminal import WIDTH, fit_text, table
from rheostat.infra.untrusted_text import make_visible
from rheostat.models.records.media import ShownImage
from rheostat.models.rollouts.groups import TurnRecord
from rheostat.models.rollouts.preview import RolloutPreview
from rheostat.placement.records import PlanInputs
from rheostat.tasks.views.metrics import format_number, format_percent, format_scientific
from rheostat.tasks.views.placement import DecisionLine
from rheostat.tasks.views.runs import RecreditedIteration, RescoredIteration, RunDescription
from rheostat.tasks.views.turns import arrange_turns

Rows = list[dict[str, str]]

CELL = 60
"""Maximum number of characters of a table cell. Longer texts are cut off."""


def iteration_rows(description: RunDescription) -> Rows:
    """Return the training metrics of a run as table rows, one row per iteration. The table is at most 100 characters
    wide."""
    reports = description.iterations
    has_other_rewards = any(report.reward != report.accuracy for report in reports)
    return [
        {
            "iteration": str(report.iteration),
            "sampled": format_number(report.accuracy),
            **({"reward": format_number(report.reward)} if has_other_rewards else {}),
            "spread": format_number(report.reward_std),
            "informative": format_percent(report.informative),
            "length": format_number(report.length, digits=1),
            "cut off": format_percent(report.truncated),
            "entropy": format_number(report.entropy),
            "kl": f"{report.kl:.4f}",
            "gradient": format_number(report.grad_norm),
            "clipped": format_percent(_sum_known(report.clip_low, report.clip_high)),
        }
        for report in reports
    ]


def _sum_known(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def term_lines(description: RunDescription) -> list[str]:
    """Return the lines of a table that lists the mean of each reward term in each iteration. Return an empty list if
    the run has only one reward term."""
    rows = [
        {"iteration": str(report.iteration), **{term: format_number(mean) for term, mean in report.terms.items()}}
        for report in description.iterations
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name, "-") for name in names} for row in rows]
    return ["rewards by term:", *table(rows).splitlines()] if len(names) > 2 else []


def work_lines(description: RunDescription) -> list[str]:
    """Return the lines of a table that lists the duration of each stage in seconds, and the digest of the policy, for
    each iteration."""
    reports = description.iterations
    stage_names = [
        name for name in (reports[0].stages if reports else {}) if any(each.stages[name] for each in reports)
    ]
    rows = [
        {
            "iteration": str(report.iteration),
            **{name: f"{report.stages[name]:.2f}" for name in stage_names},
            "total": f"{report.seconds['total']:.2f}",
            "missing": str(report.missing),
            "mismatch": format_scientific(report.mismatch),
            "policy": f"{report.policy[:16]}{' (quarantined)' if report.quarantined else ''}",
        }
        for report in reports
    ]
    seconds = table(rows, drop_first=("policy", "mismatch", "missing", *stage_names)).splitlines()
    return ["seconds by stage:", *seconds] if rows else []


def episode_lines(description: RunDescription) -> list[str]:
    """Return the lines of a table that lists statistics of the environment's episodes in each iteration. Return an
    empty list if the run has no environment."""
    reports = [(report.iteration, report.episodes) for report in description.iterations]
    rows = [{"iteration": str(number), **episodes.cells()} for number, episodes in reports if episodes is not None]
    return ["episodes:", *table(rows).splitlines()] if rows else []


def cost_lines(costs: Mapping[str, Cost]) -> list[str]:
    """Return the lines of a table that lists the costs of each role and their sum. Return an empty list if no costs
    were recorded."""
    rows = [{"cost of": role, **cost.cells()} for role, cost in {**costs, "total": total(costs.values())}.items()]
    return table(rows).splitlines() if costs else []


def decision_rows(lines: Sequence[DecisionLine]) -> Rows:
    """Return table rows with the predicted and measured durations of placement decisions (which role uses which worker
    slots), one row per decision."""
    return [
        {
            "batch": line.batch,
            "moment": line.moment,
            "predicted s": f"{line.predicted_seconds:.1f}",
            "unchanged s": f"{line.unchanged_seconds:.1f}",
            "measured s": format_number(line.measured_seconds, digits=1),
            "replay": "same" if line.replayed else "DIFFERENT",
        }
        for line in lines
    ]


def decision_text(lines: Sequence[DecisionLine]) -> str:
    """Return the text to print for placement decisions (which role uses which worker slots). Each line has the batch,
    the durations, and a sentence that explains the decision."""
    rows = table(decision_rows(lines), width=WIDTH).splitlines()
    sentences = ["decision", *(line.sentence for line in lines)]
    texts = [f"{row}  {sentence}" for row, sentence in zip(rows, sentences, strict=True)] if lines else []
    return "\n".join(map(fit_text, texts))


def assumption_rows(inputs: PlanInputs) -> Rows:
    """Return table rows with the assumed or measured workload behind a placement decision (which role uses which worker
    slots), one row per role."""
    return [
        {
            "role": role,
            "units": str(demand.units),
            "sequences": str(demand.units * demand.sequences),
            "median tokens": f"{median(demand.lengths):.0f}",
            "step ms": f"{1e3 * demand.pace.base_seconds:.2f}",
            "per sequence ms": f"{1e3 * demand.pace.per_sequence_seconds:.3f}",
            "slots per worker": str(demand.slots),
            "source": "measurements" if demand.measured else "assumptions",
        }
        for role, demand in (("rollout", inputs.rollout), ("scoring", inputs.scoring))
    ]


def rescored_rows(lines: Sequence[RescoredIteration]) -> Rows:
    """Return table rows that compare new rewards of stored completions with the original rewards, one row per
    iteration."""
    return [
        {
            "iteration": str(line.iteration),
            "completions": str(line.completions),
            "missing": str(line.missing),
            "stored reward": format_number(line.stored_reward),
            "new reward": format_number(line.reward),
            "correlation": format_number(line.correlation),
            "changed": f"{line.changed:.1%}",
        }
        for line in lines
    ]


def recredited_rows(lines: Sequence[RecreditedIteration]) -> Rows:
    """Return table rows with statistics of newly computed advantages and their correlation with the original
    advantages, one row per iteration."""
    return [
        {
            "iteration": str(line.iteration),
            "samples": str(line.samples),
            "informative groups": str(line.informative_groups),
            "mean |advantage|": format_number(line.advantage_size),
            "common samples": str(line.coinciding),
            "correlation": format_number(line.correlation),
        }
        for line in lines
    ]


def rollout_text(sample: RolloutPreview) -> str:
    """Return the text to print for one completion: a line with its reward and length, then the prompt and the
    completion. On a terminal, the completion is bold."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    reward = "missing" if sample.reward is None else f"{sample.reward:g}"
    answer = f", answer {_last_line(sample.answer)}" if sample.answer else ""
    tokens = format_count(sample.tokens, "token")
    head = (
        f"--- iteration {sample.iteration}, prompt {sample.prompt_id}, sample {sample.sample}, "
        f"reward {reward}, {tokens}, {sample.finish_reason}{answer}\n"
        f"{''.join(map(_describe_image, sample.images))}"
        f"{''.join(_describe_turns(sample.turns or ()))}"
    )
    return f"{make_visible(head)}{make_visible(sample.prompt)}{bold}{make_visible(sample.completion)}{plain}"


def _describe_image(image: ShownImage) -> str:
    return f"image {image.digest[:16]}, {image.format} {image.width} x {image.height}, {image.bytes:,} bytes\n"


def _describe_turns(turns: Sequence[TurnRecord]) -> Iterator[str]:
    """Yield one line for each turn of an episode, in the order of the tree of turns. Branches are indented."""
    for position, depth in arrange_turns([(turn.order, turn.parent) for turn in turns]):
        turn = turns[position]
        yield f"{'  ' * depth}{_describe_turn(1 + (position if turn.order is None else turn.order), turn)}"


def _describe_turn(number: int, turn: TurnRecord) -> str:
    """Describe a turn of an episode in one line: tokens, tool calls, place in the tree of turns, reward and failure."""
    parts = [
        f"{format_count(turn.tokens, 'token')} generated",
        f"{format_count(turn.observation, 'token')} of observation",
    ]
    parts += [f"{format_count(turn.calls, 'call')} ({turn.errors} could not be parsed)"] if turn.calls else []
    if turn.order is not None:
        parts += ["fresh prompt" if turn.parent is None else f"continues turn {turn.parent + 1}"]
    parts += ["replayed"] if turn.replayed else []
    parts += [f"reward {turn.reward:g}"] if turn.reward is not None else []
    parts += [f"failed: {turn.error}"] if turn.error is not None else []
    return f"turn {number}: {', '.join(parts)}\n"


def answer_rows(answer: Sequence[Mapping[str, object]]) -> Rows:
    """Return the rows of a SQL query's result as table rows of text. Long values are shortened."""
    return [{_format_cell(name): _format_cell(value) for name, value in row.items()} for row in answer]


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    text = (
        f"{value:g}" if isinstance(value, float) else make_visible(str(value)).replace("\n", "\\n").replace("\t", "\\t")
    )
    return f"{text[: CELL - 1]}…" if len(text) > CELL else text


def _last_line(text: str) -> str:
    return make_visible(text.strip().splitlines()[-1]) if text.strip() else ""


def deletion_lines(stones: Sequence[Tombstone]) -> list[str]:
    """Describe the recorded deletions in a run (tombstones) in one line for each reason."""
    lines = []
    for why, is_replaced in sorted({(stone.why, stone.is_replaced) for stone in stones}):
        same = [stone for stone in stones if (stone.why, stone.is_replaced) == (why, is_replaced)]
        what = f"{format_count(len(same), 'shard')} rewritten" if is_replaced else f"deleted {_describe_parts(same)}"
        lines.append(f"{what} by {why} (last by {max(same, key=lambda stone: stone.when).who})")
    return lines


def _describe_parts(stones: Sequence[Tombstone]) -> str:
    """Describe the stored data that was deleted according to these records of deletions (tombstones), for example "2
    policies and rollouts of 3 iterations"."""
    if stones[0].what == WHOLE_RUN:
        return "rollouts, samples and policies"
    kinds = Counter(stone.what.partition("/")[0] for stone in stones)
    bundles = [
        f"{count} {singular if count == 1 else plural}"
        for kind, singular, plural in (
            ("policies", "policy", "policies"),
            ("states", "optimizer state", "optimizer states"),
        )
        if (count := kinds.pop(kind, 0))
    ]
    iterations = kinds.total()
    rollouts = [f"rollouts of {iterations} iteration{'s' * (iterations != 1)}"] if iterations else []
    return " and ".join([*bundles, *rollouts])
