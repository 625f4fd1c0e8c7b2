"""Credit stage: computes training samples (with an advantage per token) and metrics from rollouts and scores. All
functions are pure and read tables.

Shapes: N completions, K completions that become samples, G groups, T completion tokens and S segments of all
completions, concatenated.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rheostat.infra.counts import format_count
from rheostat.infra.errors import Damaged
from rheostat.models.algorithms.advantages import informative_groups, token_advantages
from rheostat.models.algorithms.experience import Advantages, Experience, ScoredGroups
from rheostat.models.algorithms.ragged import group_statistics
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.credit.inputs import (
    TermColumns,
    check_required_outputs,
    has_nonfinite_logprobs,
    has_nonfinite_scores,
    read_auxiliary_scores,
    scored_groups,
)
from rheostat.models.credit.selection import GroupQuota, Selection, select_groups
from rheostat.models.credit.turns import GeneratedTokens
from rheostat.models.records.columns import (
    Floats,
    Integers,
    Mask,
    concatenate_tables,
    empty_rows,
    flat,
    floats,
    integers,
    large_lists,
    lengths_of,
    lists,
)
from rheostat.models.records.model_input import (
    ENVIRONMENT,
    ROLLOUT_INPUT,
    TURN_PROMPT,
    completion_lengths,
    read_segments,
    sample_columns,
)
from rheostat.models.records.schemas import (
    EXPERTS,
    PER_TOKEN,
    SAMPLE_SCHEMA,
    TERM_REWARD,
    TOP_IDS,
    TOP_LOGPROBS,
    FinishReason,
)
from rheostat.models.records.turn_prompts import count_turn_prompts, split_at_prompts


def build_sample_table(
    rollouts: pa.Table,
    made: Advantages,
    values_T: Floats | None,
    *,
    kept_N: Mask,
    emptied_N: Mask,
    policy_version: int,
    top: pa.Table | None = None,
) -> pa.Table:
    """Build the table of training samples, ordered by (prompt_row, sample).

    `made` contains the advantages and returns, and `values_T` the critic's values. The completions in the mask `kept_N`
    become samples. If the turns of an episode have separate prompts, each turn becomes one sample, in the order of
    turns. Each branch of an agent's episode becomes one sample. For a completion in the mask `emptied_N`, the sample
    contains the prompt without completion tokens. Such a sample counts towards the size of a minibatch, but not in the
    loss, the KL penalty or their denominators.

    `top` contains the columns `TOP_IDS` and `TOP_LOGPROBS` of the completions, or None if there are none. The
    column `TERM_REWARD` of `rollouts`, if present, is copied to the samples.
    """
    lengths_N = completion_lengths(rollouts)
    for name, values in (("advantages", made.advantages_T), ("values", values_T), ("returns", made.returns_T)):
        rollouts = rollouts.append_column(name, _floats_column(values, lengths_N))
    rollouts = rollouts.append_column("staleness", lists(staleness(rollouts, lengths_N, policy_version), lengths_N))
    rollouts, row_K = split_at_prompts(rollouts)
    top_columns = {} if top is None else _split_top(rollouts, top)
    for name, column in top_columns.items():
        rollouts = rollouts.append_column(name, column)
    kept_N, emptied_N = kept_N[row_K], emptied_N[row_K]
    order_K = np.lexsort((integers(rollouts["sample"]), integers(rollouts["prompt_row"])))
    order_K = order_K[kept_N[order_K]]
    rows = rollouts.drop_columns(["segments", "finish_reason", "turns"]).take(pa.array(order_K)).combine_chunks()
    columns = {name: rows[name] for name in rows.column_names}
    if emptied_N[order_K].any():
        columns |= {name: empty_rows(rows[name], emptied_N[order_K]) for name in (*PER_TOKEN, *top_columns)}
    columns |= sample_columns(rows, emptied_K=emptied_N[order_K])
    optional = [pa.field(name, columns[name].type) for name in (EXPERTS, TERM_REWARD, *top_columns) if name in columns]
    schema = pa.schema([*SAMPLE_SCHEMA, *optional])
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _split_top(rollouts: pa.Table, top: pa.Table) -> dict[str, pa.LargeListArray]:
    """Return the columns of the teacher's most probable tokens, divided among the rows of `rollouts`. These are the
    completions of `top`, in the same order, possibly split into several rows each."""
    counts_K = GeneratedTokens.of(rollouts).counts_N
    values = {name: flat(top[name]) for name in (TOP_IDS, TOP_LOGPROBS)}
    width = len(values[TOP_IDS]) // max(1, int(counts_K.sum()))
    return {name: large_lists(each, counts_K * width) for name, each in values.items()}


def staleness(
    rollouts: pa.Table, lengths_N: Integers, policy_version: int
) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Return the age of each token (T): `policy_version` minus the version of the policy that generated the token.

    Tokens that an environment inserted have -1. Raises Damaged if the segments of a rollout (runs of tokens of one
    policy version) do not add up to its tokens, or contain a version after `policy_version`.
    """
    segments = rollouts["segments"]
    row_S = np.repeat(np.arange(rollouts.num_rows), lengths_of(segments))
    parts = pc.list_flatten(segments)
    tokens_S, versions_S = (integers(pc.struct_field(parts, name)) for name in ("tokens", "policy_version"))
    num_tokens_N = np.bincount(row_S, weights=tokens_S, minlength=rollouts.num_rows)
    if not np.array_equal(num_tokens_N, lengths_N):
        row = int(np.flatnonzero(num_tokens_N != lengths_N)[0])
        raise Damaged(
            f"row {row} of the rollout shards: the completion has {format_count(lengths_N[row], 'token')}, but its "
            f"segments (the parts that one policy version generated) have {format_count(num_tokens_N[row], 'token')} "
            "in total. Restore the shard from a copy of the run."
        )
    if len(versions_S) and versions_S.max() > policy_version:
        raise Damaged(
            f"the rollout shards contain tokens of policy version {versions_S.max()}, but the newest policy of this "
            f"iteration has version {policy_version}. Restore the shards of the iteration from a copy of the run."
        )
    stale_S = np.where(versions_S < 0, ENVIRONMENT, policy_version - versions_S)
    return np.repeat(stale_S.astype(np.int16), tokens_S)


def _floats_column(values_T: Floats | None, lengths_N: Integers) -> pa.Array:
    if values_T is None:
        return pa.nulls(len(lengths_N), pa.list_(pa.float32()))
    return lists(values_T.astype(np.float32), lengths_N)


def reward_metrics(scored: ScoredGroups, informative_G: Mask) -> dict[str, float]:
    """Return metrics of an iteration's rewards: numbers of completions, groups and missing rewards, and means and
    standard deviations of rewards.

    Metrics of groups cover only groups with at least two rewards. A mean is omitted if there are no values.
    """
    groups = group_statistics(scored.total_N, scored.group_N, scored.num_groups)
    missing, completions = int((~scored.is_scored).sum()), len(scored.total_N)
    comparable_G = groups.count_G >= 2
    metrics = {
        "prompts": float(scored.num_groups),
        "completions": float(completions),
        "missing": float(missing),
        "missing_fraction": missing / max(completions, 1),
        "groups": float(comparable_G.sum()),
        "informative_groups": float(informative_G.sum()),
        **_mean("reward_mean", scored.total_N),
        **_std("reward_std", scored.total_N),
        **_mean("group_reward_std_mean", groups.std_G[comparable_G]),
    }
    for term in scored.terms:
        metrics |= _mean(f"term_{term.name}_mean", term.rewards_N)
        metrics |= _std(f"term_{term.name}_std", term.rewards_N)
    return metrics


def length_metrics(rollouts: pa.Table) -> dict[str, float]:
    """Return two metrics over all completions, with or without a reward: the mean number of generated tokens, and the
    share of completions truncated at the length limit."""
    lengths_N = GeneratedTokens.of(rollouts).counts_N.astype(np.float64)
    return _mean("length_mean", lengths_N) | _mean("truncated_fraction", truncated(rollouts).astype(np.float64))


ENDINGS: Final = (FinishReason.STOP, FinishReason.TURNS, FinishReason.LENGTH, FinishReason.FAILED)
"""Finish reasons of episodes for which `turn_metrics` reports a share."""


def turn_metrics(rollouts: pa.Table) -> dict[str, float]:
    """Return metrics of episodes, such as the mean numbers of turns and tool calls. Empty if the completions are not
    episodes."""
    episodes = rollouts["turns"].drop_null()
    if not len(episodes):
        return {}
    parts = pc.list_flatten(episodes)
    calls, errors = (float(integers(pc.struct_field(parts, name)).sum()) for name in ("calls", "errors"))
    tokens_S, versions_S = read_segments(rollouts)
    prompts, observations = (float(tokens_S[versions_S == each].sum()) for each in (TURN_PROMPT, ENVIRONMENT))
    endings = {reason: pc.equal(rollouts["finish_reason"], reason.value).to_numpy().mean() for reason in ENDINGS}
    is_branched = pc.struct_field(parts, "order").null_count < len(parts)
    num_branches = float((count_turn_prompts(rollouts) + (completion_lengths(rollouts) > 0)).sum())
    return {
        "turns_mean": len(parts) / len(episodes),
        **({"branches_mean": num_branches / len(episodes)} if is_branched else {}),
        **({"turn_prompt_tokens_mean": prompts / len(episodes)} if prompts else {}),
        **({"observation_tokens_mean": observations / len(episodes)} if observations or not prompts else {}),
        "calls_mean": calls / len(episodes),
        **({"call_error_fraction": errors / calls} if calls else {}),
        **{f"ended_{reason.value}_fraction": float(share) for reason, share in endings.items()},
    }


def truncated(rollouts: pa.Table) -> Mask:
    """Return a mask of the completions (N) that were truncated at the length limit."""
    truncated_N: Mask = pc.equal(rollouts["finish_reason"], FinishReason.LENGTH.value).to_numpy()
    return truncated_N


def count_missing_reasons(scores: pa.Table, unusable: Mapping[str, Mask]) -> Counter[str]:
    """Count the completions that cannot be trained on, by the reason stored in `scores` or, for masks in `unusable`, by
    the key of the mask. A completion with several reasons is counted under the first."""
    missing_N = np.isnan(floats(scores["reward"]))
    reasons = Counter(error for error, missing in zip(scores["error"].to_pylist(), missing_N, strict=True) if missing)
    for reason, bad_N in unusable.items():
        reasons += Counter({reason: int((bad_N & ~missing_N).sum())})
        missing_N = missing_N | bad_N
    return reasons


def _mean(name: str, values_N: Floats) -> dict[str, float]:
    """Return the mean of the finite values under the key `name`, or an empty dict if there are none."""
    finite_N = values_N[np.isfinite(values_N)]
    return {name: float(finite_N.mean())} if len(finite_N) else {}


def _std(name: str, values_N: Floats) -> dict[str, float]:
    """Return the standard deviation of the finite values under the key `name`, or an empty dict if there are none."""
    finite_N = values_N[np.isfinite(values_N)]
    return {name: float(finite_N.std())} if len(finite_N) else {}


ROLLOUT_COLUMNS = (
    "prompt_row", "sample", *ROLLOUT_INPUT, "logprobs", "finish_reason", "turns",
)  # fmt: skip
"""Columns of the rollout shards that the credit computation reads."""

BAD_LOGPROBS = "rollout: behaviour log-probs are not finite"
"""Reason for excluding a completion from training: the log-probs in its rollout are not finite."""

BAD_ESTIMATES = "estimate: a model's numbers are not finite"
"""Reason for excluding a completion from training: an output of an auxiliary model (reference, critic or teacher) is
not finite."""


@dataclass(frozen=True, slots=True)
class CreditRule:
    """Settings from which credit (the advantage of each token) is computed."""

    terms: tuple[TermColumns, ...]
    """Reward terms, with their column names in score tables and their factors in the total reward."""
    algorithm: AlgorithmConfig
    """Algorithm that computes the advantages, with its settings."""
    quota: GroupQuota | None = None
    """Number of groups that dynamic sampling requires. If None, dynamic sampling is off and every group that the
    algorithm can use is trained on."""
    policy_version: int = 0
    """Version of the policy that will be trained on the samples."""
    max_new_tokens: int = 0
    """Maximum length of completions in tokens, from which the length penalty is computed."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL penalty in the reward, in the current iteration."""
    sample_term: str = ""
    """Name of the reward term whose scores are stored with the samples. Empty if no scores are stored."""

    @property
    def uses_top_tokens(self) -> bool:
        """Whether samples contain the teacher's most probable tokens."""
        return self.algorithm.teacher_top_k > 0


@dataclass(frozen=True, slots=True)
class Credit:
    """Result of the credit computation: training samples, metrics, and the reasons why some completions are not trained
    on."""

    samples: pa.Table
    """Table of training samples, with an advantage for each completion token."""
    metrics: dict[str, float]
    """Metrics of the completions, rewards and training samples, by name."""
    errors: Counter[str]
    """Number of completions that are not trained on, by reason."""
    surplus: tuple[tuple[int, ...], ...] = ()
    """Prompt rows of surplus groups (informative groups beyond the target, which are kept for the next iteration), as
    one tuple for each pair of rollout and score tables."""


def credit_completions(
    rollouts: Sequence[pa.Table],
    scores: Sequence[pa.Table],
    rule: CreditRule,
    *,
    auxiliary_scores: Sequence[pa.Table] = (),
) -> Credit:
    """Compute the advantage of each token of each completion with a reward, and build the training samples.

    The tables at the same position in `rollouts`, `scores` and `auxiliary_scores` must contain the same completions in
    the same order. Completions without a reward are omitted. Groups without a training signal (all rewards equal) are
    omitted too, unless the algorithm trains on them. With dynamic sampling, `rule.quota` selects the groups instead.
    Raises Damaged if the tables do not match, and BadInput if auxiliary scores that the algorithm needs are missing.
    """
    _check_paired(rollouts, scores, "scores")
    if auxiliary_scores:
        _check_paired(rollouts, auxiliary_scores, "estimates")
    _check_disjoint(rollouts)
    table, score_table = concatenate_tables(rollouts).combine_chunks(), pa.concat_tables(scores).combine_chunks()
    lengths_N, completion_tokens = completion_lengths(table), GeneratedTokens.of(table)
    models = read_auxiliary_scores(auxiliary_scores, lengths_N)
    check_required_outputs(models, rule.algorithm)
    bad = {
        BAD_LOGPROBS: has_nonfinite_logprobs(table["logprobs"], lengths_N),
        BAD_ESTIMATES: has_nonfinite_scores(models, lengths_N),
    }
    unusable_N = bad[BAD_LOGPROBS] | bad[BAD_ESTIMATES]
    scored = completion_tokens.select_groups(scored_groups(score_table, lengths_N, rule.terms, unusable_N=unusable_N))
    chosen = _choose_completions(table, scored, rule)
    experience = Experience(
        scored=scored,
        logprobs_T=completion_tokens.select(flat(table["logprobs"]).astype(np.float64)),
        counted_N=chosen.kept_N & ~chosen.filling_N,
        auxiliary_scores=completion_tokens.select_scores(models),
        max_new_tokens=rule.max_new_tokens,
        kl_coefficient=rule.kl_coefficient,
    )
    advantages = completion_tokens.expand_to_all_tokens(token_advantages(experience, rule.algorithm))
    for term in scored.terms:
        if term.name == rule.sample_term:
            table = table.append_column(TERM_REWARD, pa.array(term.rewards_N, from_pandas=True))
    samples = build_sample_table(
        table,
        advantages,
        models.values_T,
        kept_N=chosen.kept_N,
        emptied_N=chosen.filling_N | chosen.masked_N,
        policy_version=rule.policy_version,
        top=pa.concat_tables(auxiliary_scores) if rule.uses_top_tokens else None,
    )
    metrics = {
        "samples": float(samples.num_rows),
        "tokens": float(lengths_of(samples["tokens"]).sum()),
        "bad_logprobs": float(bad[BAD_LOGPROBS].sum()),
        **({"bad_estimates": float(bad[BAD_ESTIMATES].sum())} if auxiliary_scores else {}),
        **reward_metrics(scored, chosen.informative_G),
        **length_metrics(table),
        **turn_metrics(table),
        **advantages.metrics,
        **({"masked": float(chosen.masked_N.sum())} if rule.algorithm.mask_truncated else {}),
        **(chosen.selection.metrics() if chosen.selection else {}),
    }
    surplus = _surplus(rollouts, chosen.selection) if chosen.selection else ()
    return Credit(samples=samples, metrics=metrics, errors=count_missing_reasons(score_table, bad), surplus=surplus)


def _check_paired(rollouts: Sequence[pa.Table], others: Sequence[pa.Table], what: str) -> None:
    for position, (rollout, other) in enumerate(zip(rollouts, others, strict=True)):
        for name in ("prompt_row", "sample"):
            if not rollout[name].equals(other[name]):
                raise Damaged(
                    f"rollout shard {position} with {rollout.num_rows} rows and its {what} with {other.num_rows} rows "
                    f"do not contain the same completions in the same order, because their columns {name!r} differ. "
                    "Restore both shards from a copy of the run."
                )


def _check_disjoint(rollouts: Sequence[pa.Table]) -> None:
    """Raise Damaged if the same prompt occurs in two tables. The two groups of completions would otherwise be treated
    as one group."""
    earlier_rows: set[int] = set()
    for position, rollout in enumerate(rollouts):
        rows = set(pc.unique(rollout["prompt_row"]).to_pylist())
        if earlier_rows & rows:
            raise Damaged(
                f"rollout shard {position} contains prompt row {min(earlier_rows & rows)}, which is also in an "
                "earlier shard of the iteration, but all completions of a prompt must be in one shard. Restore the "
                "shards from a copy of the run."
            )
        earlier_rows |= rows


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Masks over the completions (N) that select which completions become training samples, and which of these samples
    have no weight in the loss."""

    informative_G: Mask
    kept_N: Mask
    """Completions that become training samples, with or without weight in the loss."""
    filling_N: Mask
    """Kept completions of groups without a training signal. They only complete a minibatch and have no weight in the
    loss."""
    masked_N: Mask
    """Kept completions that were truncated at the length limit and are therefore excluded from the loss."""
    selection: Selection | None


def _choose_completions(rollouts: pa.Table, scored: ScoredGroups, rule: CreditRule) -> _Chosen:
    algorithm, scored_N, group_N = rule.algorithm, scored.is_scored, scored.group_N
    informative_G = informative_groups(scored, algorithm)
    selection = None if rule.quota is None else select_groups(scored, algorithm, rule.quota)
    if selection is not None:
        filling_N = selection.filling_G[group_N]
        is_trained_N = scored_N & (selection.trained_G[group_N] | filling_N)
    else:
        is_trained_N = scored_N if algorithm.keeps_uninformative else scored_N & informative_G[group_N]
        filling_N = np.zeros_like(is_trained_N)
    masked_N = is_trained_N & truncated(rollouts) if algorithm.mask_truncated else np.zeros_like(is_trained_N)
    return _Chosen(informative_G, is_trained_N, filling_N=filling_N, masked_N=masked_N, selection=selection)


def _surplus(rollouts: Sequence[pa.Table], selection: Selection) -> tuple[tuple[int, ...], ...]:
    begin = 0
    surplus: list[tuple[int, ...]] = []
    for rollout in rollouts:
        first = np.sort(selection.first_G[selection.surplus_G])
        mine = first[(first >= begin) & (first < begin + rollout.num_rows)] - begin
        surplus.append(tuple(integers(rollout["prompt_row"])[mine].tolist()))
        begin += rollout.num_rows
    return tuple(surplus)
