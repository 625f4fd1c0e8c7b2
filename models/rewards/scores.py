"""Combination of the results of all rewards into a score shard, as pure functions. Torch-free."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rheostat.infra.errors import BadInput
from rheostat.infra.statistics import pass_at
from rheostat.models.config.reward_terms import RewardTerm
from rheostat.models.config.rewards import RewardConfig, ScoringConfig
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.records.schemas import FEEDBACK_COLUMN, score_schema
from rheostat.models.rewards.evaluate import NO_TOKEN_TEXTS, Value, Verdict
from rheostat.models.text.steps import Spans, StepValues, aggregate, assign_spans


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of all reward terms for one completion, in the order of the configured terms."""

    values: tuple[float | Spans | None, ...]
    """Result of each reward term: one number, numbers for spans of tokens if the term scores steps, tokens or turns, or
    None if the result is missing."""
    error: str | None
    """First error of a reward term as `term: reason`, or None if there is no error."""
    feedback: str | None = None
    """Feedback of all reward terms, joined by newlines, or None if there is none."""


def combine_results(
    ruled: Sequence[Verdict],
    others: Mapping[str, Sequence[Judgement | StepValues | Spans]],
    scoring: ScoringConfig,
    *,
    starts: Sequence[Sequence[int] | None],
    failures: Sequence[str | None],
) -> list[Scores]:
    """Combine the results of all kinds of rewards into the scores of each completion.

    `ruled` contains the results of the rewards that are functions, one item per completion. `others` contains the
    results of judges, reward models, programs and environments by the name of the reward term. `starts` contains the
    character index at which each token of a completion starts, or None if the tokens do not decode to the completion.
    `failures` contains the error of each completion's environment: if an episode has failed, all its results are
    missing.
    """
    nothing = (None,) * len(scoring.terms)
    return [
        _join_row(verdict, {term: column[row] for term, column in others.items()}, scoring, starts=starts[row])
        if failures[row] is None
        else Scores(nothing, f"environment: {failures[row]}")
        for row, verdict in enumerate(ruled)
    ]


def score_table(rollouts: pa.Table, scores: Sequence[Scores], scoring: ScoringConfig) -> pa.Table:
    """Build the score table for a rollout table, with one row per completion. The total reward is missing if the result
    of one term is missing."""
    scalars = [
        tuple(_scalar(value, reward) for value, reward in zip(row.values, scoring.rewards, strict=True))
        for row in scores
    ]
    totals = [_total(values, row.error, scoring) for values, row in zip(scalars, scores, strict=True)]
    columns = {
        "prompt_row": rollouts["prompt_row"],
        "sample": rollouts["sample"],
        "reward": pa.array([reward for reward, _ in totals], pa.float64()),
        **{
            f"reward_{term}": pa.array([values[index] for values in scalars], pa.float64())
            for index, term in enumerate(scoring.terms)
        },
        "error": pa.array([error for _, error in totals], pa.string()),
    }
    for index, term in enumerate(scoring.terms):
        if term in scoring.process_terms:
            spans = [row.values[index] for row in scores]
            columns |= _process_columns(term, [span if isinstance(span, Spans) else None for span in spans])
    if scoring.has_feedback:
        columns[FEEDBACK_COLUMN] = pa.array([row.feedback for row in scores], pa.string())
    schema = score_schema(scoring.terms, scoring.process_terms, has_feedback=scoring.has_feedback)
    return pa.table(columns, schema=schema)


def score_metrics(table: pa.Table, terms: Sequence[str]) -> dict[str, float]:
    """Return metrics of a score table: numbers of rows and of missing scores, and sums and sums of squares of rewards.
    Unlike means, these metrics can be summed over shards."""
    scored = table.filter(pc.is_valid(table["reward"]))  # a term may have a value although another term is missing
    values = {term: scored[f"reward_{term}"].to_pylist() for term in terms}
    return {
        "count": float(table.num_rows),
        "missing": float(table["reward"].null_count),
        "reward_sum": math.fsum(scored["reward"].to_pylist()),
        **{f"term_{term}_sum": math.fsum(numbers) for term, numbers in values.items()},
        **{f"term_{term}_squares": math.fsum(number**2 for number in numbers) for term, numbers in values.items()},
    }


def problem_metrics(tables: Iterable[pa.Table], term: str, *, samples: int) -> dict[str, float]:
    """Return the mean of a reward term over problems, where the value of a problem is the mean over its scored samples.
    `samples` is the number of samples per problem.

    If all scores are 0 or 1, also returns pass@k for k = 1, 2, 4, ..., over the problems that have at least k scores.
    """
    values = _scores_by_prompt(tables, term)
    means = [math.fsum(each) / len(each) for each in values.values()]
    metrics = {
        "accuracy": math.fsum(means) / len(means) if means else 0.0,
        "squares": math.fsum(mean**2 for mean in means),
        "problems": float(len(means)),
        "samples": float(samples),
    }
    if all(value in (0, 1) for each in values.values() for value in each):
        for k in (2**power for power in range(samples.bit_length())):
            solved = [pass_at(k, samples=len(v), right=int(sum(v))) for v in values.values() if len(v) >= k]
            metrics |= {f"pass_at_{k}": math.fsum(solved) / len(solved)} if solved else {}
    return metrics


def measure_solve_rates(tables: Iterable[pa.Table], reward: RewardTerm) -> dict[int, float]:
    """Return the solve rate of each prompt row in score tables: the mean score of a reward term over the scored
    completions of the prompt, as a share of the range of scores, limited to 0 to 1.

    If the range of scores is unknown, it is 0 to 1. Prompts without a scored completion are left out. Raises BadInput
    if the range is unknown and a mean score is outside of 0 to 1.
    """
    low, high = reward.score_range or (0.0, 1.0)
    means = {row: math.fsum(each) / len(each) for row, each in sorted(_scores_by_prompt(tables, reward.term).items())}
    outside = [mean for mean in means.values() if not low <= mean <= high]
    if reward.score_range is None and outside:
        raise BadInput(
            f"rollout.curriculum needs scores from 0 to 1, but a prompt has the mean score {outside[0]:g} in reward "
            f"{reward.term!r}. Scale the scores of this reward, or set rollout.curriculum.metric to another reward."
        )
    return {row: min(1.0, max(0.0, (mean - low) / ((high - low) or 1.0))) for row, mean in means.items()}


def _scores_by_prompt(tables: Iterable[pa.Table], term: str) -> dict[int, list[float]]:
    """Return the scores of a reward term by prompt row. Completions without a total reward are left out."""
    values: dict[int, list[float]] = {}
    for table in tables:
        scored = table.filter(pc.is_valid(table["reward"]))
        for row, value in zip(scored["prompt_row"].to_pylist(), scored[f"reward_{term}"].to_pylist(), strict=True):
            values.setdefault(row, []).append(value)
    return values


def _join_row(
    verdict: Verdict,
    others: Mapping[str, Judgement | StepValues | Spans],
    scoring: ScoringConfig,
    *,
    starts: Sequence[int] | None,
) -> Scores:
    """Combine the results of all rewards for one completion. Values of steps are converted to values of spans of
    tokens, with the character index `starts` of each token."""
    values_by_term: dict[str, Value | Spans | None] = dict(zip(scoring.rule_terms, verdict.values, strict=True))
    errors, feedback = [verdict.error] if verdict.error else [], dict(verdict.feedback)
    for term, judgement in others.items():
        values_by_term[term] = judgement.value if isinstance(judgement, Judgement) else judgement
        if isinstance(judgement, Judgement) and judgement.error:
            errors.append(f"{term}: {judgement.error}")
        if isinstance(judgement, Judgement):
            feedback[term] = judgement.feedback
    values: list[float | Spans | None] = []
    for term, reward in zip(scoring.terms, scoring.rewards, strict=True):
        value = values_by_term[term]
        if isinstance(value, StepValues) and starts is None:
            errors.append(f"{term}: {NO_TOKEN_TEXTS}")
            value = None
        values.append(value if not isinstance(value, StepValues) else _spans(value, reward, starts or ()))
    text = "\n".join(feedback[term] for term in scoring.terms if feedback.get(term))
    return Scores(tuple(values), errors[0] if errors else None, text or None)


def _spans(found: StepValues, reward: RewardConfig, starts: Sequence[int]) -> Spans:
    """Convert the values of a completion's steps or tokens to values of spans (runs of tokens with one value). `starts`
    is the character index at which each token starts."""
    if reward.granularity == "token":
        return Spans(tuple(range(len(found.values))), found.values)
    return assign_spans(starts, found)


def _scalar(value: float | Spans | None, reward: RewardConfig) -> float | None:
    """Return the result of a reward term as one number. The values of spans are combined by the configured
    aggregation."""
    return aggregate(value.values, reward.aggregation) if isinstance(value, Spans) else value


def _process_columns(term: str, spans: Sequence[Spans | None]) -> dict[str, pa.Array]:
    """Build the two score-table columns of a process reward (a reward of steps, tokens or turns): the first token of
    each span, and the value of each span."""
    return {
        f"spans_{term}": pa.array([span and span.starts for span in spans], pa.list_(pa.int32())),
        f"values_{term}": pa.array([span and span.values for span in spans], pa.list_(pa.float64())),
    }


def _total(
    values: Sequence[float | None], error: str | None, scoring: ScoringConfig
) -> tuple[float | None, str | None]:
    """Return the total reward of a completion, the weighted sum of its terms, and None. If a term is missing or the sum
    is not finite, return None and the error."""
    weighted = [
        reward.weight * ((value - reward.shift) / reward.scale)
        for reward, value in zip(scoring.rewards, values, strict=True)
        if value is not None
    ]
    if len(weighted) < len(scoring.rewards):
        return None, error
    total = sum(weighted)
    return (
        (total, None)
        if math.isfinite(total)
        else (None, f"total: the weighted sum of the rewards is {total}, which is not finite")
    )
