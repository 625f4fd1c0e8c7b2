"""From rollouts and their scores to training samples: pure functions over tables.

Shapes: N completions, G groups, T completion tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.errors import Damaged
from models.algorithms.advantages import informative_groups, keeps_uninformative, token_advantages
from models.algorithms.config import AlgorithmConfig
from models.algorithms.experience import Estimates, Experience, ScoredGroups
from models.algorithms.groups import Floats, Integers, Mask, group_statistics
from models.columns import Numbers, flat, floats, integers, lengths_of
from models.records import FinishReason
from models.sample_table import sample_table
from models.score_columns import TermColumns, scored_groups
from models.selection import Selection, Wanted, select_groups

ROLLOUT_COLUMNS = (
    "prompt_row", "sample", "prompt_tokens", "completion_tokens", "logprobs", "finish_reason", "segments",
)  # fmt: skip
"""Columns of the rollout shards that credit reads."""
BAD_LOGPROBS = "rollout: behaviour log-probs are not finite"
BAD_ESTIMATES = "estimate: a model's numbers are not finite"
"""The reasons that a completion without usable numbers is missing."""


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How credit is given."""

    terms: tuple[TermColumns, ...]
    algorithm: AlgorithmConfig
    wanted: Wanted | None = None
    """Groups that dynamic sampling wants; none takes every group that the algorithm learns from."""
    policy_version: int = 0
    """Version that learns from the samples."""
    max_new_tokens: int = 0
    """Length limit of completions."""
    kl_coefficient: float = 0.0
    """Of the penalty in the reward."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Training samples, what they were made from in numbers, and what went missing."""

    samples: pa.Table
    metrics: dict[str, float]
    errors: Counter[str]
    """Reasons of the missing completions, each with its count."""
    surplus: tuple[tuple[int, ...], ...] = ()
    """Prompt rows of informative groups beyond the target, by pair of tables."""


def assign_credit(
    rollouts: Sequence[pa.Table],
    scores: Sequence[pa.Table],
    rule: CreditRule,
    *,
    estimates: Sequence[pa.Table] = (),
) -> Credit:
    """Give each token of each scored completion its advantage.

    Tables of a position must list the same completions in the same order. Missing completions are left out, and so are
    groups that teach nothing, unless the algorithm keeps them. Where sampling is dynamic, the groups that are wanted
    are trained, whatever the algorithm would keep.
    """
    _check_paired(rollouts, scores, "scores")
    if estimates:
        _check_paired(rollouts, estimates, "estimates")
    _check_apart(rollouts)
    table, judged = pa.concat_tables(rollouts).combine_chunks(), pa.concat_tables(scores).combine_chunks()
    lengths_N = lengths_of(table["completion_tokens"])
    models = _estimates(estimates, lengths_N)
    missing = {BAD_LOGPROBS: _bad_logprobs(table), BAD_ESTIMATES: _bad_estimates(models, lengths_N)}
    scored = scored_groups(judged, lengths_N, rule.terms, unusable_N=np.logical_or.reduce([*missing.values()]))
    selection = None if rule.wanted is None else select_groups(scored, rule.algorithm, rule.wanted)
    informative_G = informative_groups(scored, rule.algorithm)
    kept_N, filling_N = _kept(scored, informative_G, selection, rule.algorithm)
    experience = Experience(
        scored=scored,
        logprobs_T=flat(table["logprobs"]).astype(np.float64),
        counted_N=kept_N & ~filling_N,
        estimates=models,
        max_new_tokens=rule.max_new_tokens,
        kl_coefficient=rule.kl_coefficient,
    )
    made = token_advantages(experience, rule.algorithm)
    masked_N = kept_N & _truncated(table) if rule.algorithm.mask_truncated else np.zeros_like(kept_N)
    samples = sample_table(
        table, made, models.values_T, kept_N=kept_N, emptied_N=filling_N | masked_N, policy_version=rule.policy_version
    )
    metrics = {
        "samples": float(samples.num_rows),
        "tokens": float(lengths_of(samples["tokens"]).sum()),
        "bad_logprobs": float(missing[BAD_LOGPROBS].sum()),
        **({"bad_estimates": float(missing[BAD_ESTIMATES].sum())} if estimates else {}),
        **({"masked": float(masked_N.sum())} if rule.algorithm.mask_truncated else {}),
        **_reward_metrics(scored, informative_G),
        **_length_metrics(table),
        **made.metrics,
        **(selection.metrics() if selection else {}),
    }
    for term in scored.terms:
        metrics |= _mean(f"term_{term.name}_mean", term.rewards_N)
    surplus = _surplus(rollouts, selection) if selection else ()
    return Credit(samples=samples, metrics=metrics, errors=_errors(judged, missing), surplus=surplus)


def _check_paired(rollouts: Sequence[pa.Table], others: Sequence[pa.Table], what: str) -> None:
    for position, (rollout, other) in enumerate(zip(rollouts, others, strict=True)):
        for name in ("prompt_row", "sample"):
            if not rollout[name].equals(other[name]):
                raise Damaged(
                    f"pair {position} of {rollout.num_rows} rollouts and {other.num_rows} {what}: their {name} differ"
                )


def _check_apart(rollouts: Sequence[pa.Table]) -> None:
    """Refuse a prompt in two tables: its groups would be taken for one."""
    seen: set[int] = set()
    for position, rollout in enumerate(rollouts):
        rows = set(pc.unique(rollout["prompt_row"]).to_pylist())
        if seen & rows:
            raise Damaged(f"pair {position}: prompt row {min(seen & rows)} is in an earlier pair too")
        seen |= rows


def _kept(
    scored: ScoredGroups, informative_G: Mask, selection: Selection | None, algorithm: AlgorithmConfig
) -> tuple[Mask, Mask]:
    """Return which completions become samples, and which of these only fill."""
    scored_N, group_N = scored.is_scored, scored.group_N
    if selection is not None:
        filling_N = selection.filling_G[group_N]
        return scored_N & (selection.trained_G[group_N] | filling_N), filling_N
    kept_N = scored_N if keeps_uninformative(algorithm) else scored_N & informative_G[group_N]
    return kept_N, np.zeros_like(kept_N)


def _surplus(rollouts: Sequence[pa.Table], selection: Selection) -> tuple[tuple[int, ...], ...]:
    begin = 0
    surplus: list[tuple[int, ...]] = []
    for rollout in rollouts:
        first = np.sort(selection.first_G[selection.surplus_G])
        mine = first[(first >= begin) & (first < begin + rollout.num_rows)] - begin
        surplus.append(tuple(integers(rollout["prompt_row"])[mine].tolist()))
        begin += rollout.num_rows
    return tuple(surplus)


def _estimates(tables: Sequence[pa.Table], lengths_N: Integers) -> Estimates:
    """Read what models say of tokens; a column in which no completion has anything was not asked for."""
    if not tables:
        return Estimates()
    table = pa.concat_tables(tables).combine_chunks()
    columns: dict[str, Floats | None] = {}
    for name in ("policy", "reference", "teacher", "values"):
        asked = table[name].null_count < table.num_rows
        if asked and not np.array_equal(lengths_of(table[name]), lengths_N):
            raise Damaged(f"estimates: expected one number of {name!r} per completion token, found other lengths")
        columns[name] = flat(table[name]).astype(np.float64) if asked or not table.num_rows else None
    return Estimates(
        policy_T=columns["policy"],
        reference_T=columns["reference"],
        teacher_T=columns["teacher"],
        values_T=columns["values"],
    )


def _bad_logprobs(table: pa.Table) -> Mask:
    """Find completions whose log-probs would poison the update."""
    lengths_N = lengths_of(table["completion_tokens"])
    if not np.array_equal(lengths_of(table["logprobs"]), lengths_N):
        raise Damaged("rollouts: expected one log-prob per completion token, found other lengths")
    return _not_finite(flat(table["logprobs"]), lengths_N)


def _bad_estimates(models: Estimates, lengths_N: Integers) -> Mask:
    """Find completions of which a model says what is no number."""
    found = (models.policy_T, models.reference_T, models.teacher_T, models.values_T)
    bad_N = np.zeros(len(lengths_N), np.bool_)
    for values_T in found:
        if values_T is not None:
            bad_N |= _not_finite(values_T, lengths_N)
    return bad_N


def _not_finite(values_T: Numbers, lengths_N: Integers) -> Mask:
    wrong = np.flatnonzero(~np.isfinite(values_T))
    bad_N = np.zeros(len(lengths_N), np.bool_)
    bad_N[np.searchsorted(np.cumsum(lengths_N), wrong, side="right")] = True
    return bad_N


def _truncated(table: pa.Table) -> Mask:
    """Find completions that the length limit ended."""
    truncated_N: Mask = pc.equal(table["finish_reason"], FinishReason.LENGTH.value).to_numpy()
    return truncated_N


def _reward_metrics(scored: ScoredGroups, informative_G: Mask) -> dict[str, float]:
    """Describe rewards and groups; a group is counted with two rewards, and a mean over nothing is left out."""
    groups = group_statistics(scored.total_N, scored.group_N, scored.num_groups)
    missing, completions = int((~scored.is_scored).sum()), len(scored.total_N)
    comparable_G = groups.count_G >= 2
    return {
        "prompts": float(scored.num_groups),
        "completions": float(completions),
        "missing": float(missing),
        "missing_fraction": missing / max(completions, 1),
        "groups": float(comparable_G.sum()),
        "informative_groups": float(informative_G.sum()),
        **_mean("reward_mean", scored.total_N),
        **({"reward_std": float(scored.total_N[scored.is_scored].std())} if scored.is_scored.any() else {}),
        **_mean("group_reward_std_mean", groups.std_G[comparable_G]),
    }


def _length_metrics(table: pa.Table) -> dict[str, float]:
    """Describe all completions, missing ones too."""
    lengths_N = lengths_of(table["completion_tokens"]).astype(np.float64)
    truncated_N = _truncated(table).astype(np.float64)
    return _mean("length_mean", lengths_N) | _mean("truncated_fraction", truncated_N)


def _errors(judged: pa.Table, unusable: Mapping[str, Mask]) -> Counter[str]:
    """Count why completions are missing, each for the first reason that it has."""
    missing_N = np.isnan(floats(judged["reward"]))
    errors = Counter(error for error, missing in zip(judged["error"].to_pylist(), missing_N, strict=True) if missing)
    for reason, bad_N in unusable.items():
        errors += Counter({reason: int((bad_N & ~missing_N).sum())})
        missing_N = missing_N | bad_N
    return errors


def _mean(name: str, values_N: Floats) -> dict[str, float]:
    """Name the mean of what is not missing; where all is, there is none to name."""
    found_N = values_N[np.isfinite(values_N)]
    return {name: float(found_N.mean())} if len(found_N) else {}
