"""Worker that scores completions and turns rewards into training samples. This module does not import torch."""

import time
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
from pydantic import JsonValue
from tokenizers import Tokenizer

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.store.bundles import fetch_bundle_file
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.config.judges import ServedReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.credit.assign import ROLLOUT_COLUMNS, Credit, CreditRule, credit_completions
from rheostat.models.credit.comparison import compare_advantages, compare_rewards, read_rewards, read_total_rewards
from rheostat.models.credit.inputs import term_columns
from rheostat.models.credit.selection import GroupQuota, informative_prompts
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.judges.votes import read_step_values, tally, tally_steps
from rheostat.models.records.columns import select_rows
from rheostat.models.records.media import Media
from rheostat.models.records.model_input import COMPLETION_TOKENS, image_digests, select_with_optional
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import ComparisonWork, CreditWork, ExcerptWork, ScoringWork
from rheostat.models.rewards.code import CodeJudge
from rheostat.models.rewards.environment import (
    environment_rewards,
    find_failures,
    find_turn_starts,
    find_turn_texts,
    read_turns,
)
from rheostat.models.rewards.evaluate import Case, Evaluator
from rheostat.models.rewards.scores import combine_results, measure_solve_rates, score_metrics, score_table
from rheostat.models.rollouts.groups import TurnRecord
from rheostat.models.rollouts.preview import Excerpts, read_excerpts
from rheostat.models.text.steps import Spans, StepValues
from rheostat.models.text.token_offsets import find_token_starts, open_tokenizer, split_tokens

PLACES = ("prompt_row", "sample")
TEXTS = ("prompt", "completion", "answer")


class ScoringWorker:
    """Worker that scores completions and computes credit (the advantage of each token). The processes that run reward
    code are reused for later work units."""

    def __init__(self, store_uri: str, run: str, scoring: ScoringConfig, algorithm: AlgorithmConfig) -> None:
        self._store = run_store(store_uri, run)
        self._scoring = scoring
        self._algorithm = algorithm
        self._evaluator, self._code = Evaluator(scoring), CodeJudge(scoring)
        self._tokenizer: tuple[str, Tokenizer] | None = None  # digest of the tokenizer's bundle, and the tokenizer
        self._credited = 0

    def score(self, work: ScoringWork) -> Outcome:
        """Score every completion of a rollout shard, and write a score shard with the same rows. Raises Quarantined,
        without writing, if too many scores are missing, so that the next attempt scores again. Raises BadInput if the
        work unit lacks verdicts or a tokenizer."""
        started = time.perf_counter()
        columns = (*PLACES, *TEXTS, COMPLETION_TOKENS, "images", "segments", "turns", "messages")
        rollouts = read_shard(self._store, work.rollouts, columns)
        episodes = read_turns(rollouts)
        served, starts = self._read_verdicts(rollouts, work), self._find_token_starts(rollouts, work)
        cases = _build_cases(rollouts, starts, episodes, iteration=work.iteration)
        ruled = self._evaluator.evaluate(cases, Media(self._store, work.media))
        others = (
            served
            | self._code.judge(cases)
            | {term: environment_rewards(episodes, each) for term, each in self._scoring.environment_rewards.items()}
        )
        scores = combine_results(ruled, others, self._scoring, starts=starts, failures=find_failures(episodes))
        table = score_table(rollouts, scores, self._scoring)
        _check_max_missing(table, work)
        metadata = {"iteration": str(work.iteration), "rollouts": work.rollouts.digest}
        ref = write_shard(self._store, table, kind="scores", metadata=metadata)
        timings = {"score_seconds": time.perf_counter() - started}
        metrics = score_metrics(table, self._scoring.terms)
        if work.metric:
            metrics["informative_groups"] = float(self._count_informative(rollouts, table, work.metric))
        return Outcome(shards=(ref,), metrics=metrics, timings=timings)

    def credit(self, work: CreditWork) -> Outcome:
        """Compute an iteration's training samples from its rollouts and scores, and write them as one shard. Raises
        Quarantined if too many scores are missing or, if configured, too few groups are informative (have unequal
        rewards).

        With dynamic sampling, `surplus` in the detail lists informative groups beyond the target, which are used in the
        next iteration: their prompt rows, by the index of their shard in the work. With a curriculum, `solve_rates` in
        the detail lists the prompt rows and their solve rates.
        """
        started = time.perf_counter()
        rule = build_credit_rule(work, self._scoring, self._algorithm)
        estimates = zip(work.estimates, work.shards, strict=True) if work.estimates else ()
        scores = [select_rows(read_shard(self._store, shard.scores), shard.rows) for shard in work.shards]
        credit = credit_completions(
            [
                select_rows(select_with_optional(read_shard(self._store, shard.rollouts), ROLLOUT_COLUMNS), shard.rows)
                for shard in work.shards
            ],
            scores,
            rule,
            auxiliary_scores=[
                select_rows(read_shard(self._store, estimate), shard.rows) for estimate, shard in estimates
            ],
        )
        check_missing(credit, max_missing=self._scoring.max_missing, iteration=work.iteration)
        check_shortfall(credit, work)
        metadata = {"iteration": str(work.iteration)}
        ref = write_shard(self._store, credit.samples, kind="samples", metadata=metadata)
        self._credited += int(credit.metrics["completions"])
        surplus: list[JsonValue] = [
            {"shard": shard, "rows": list(rows)} for shard, rows in enumerate(credit.surplus) if rows
        ]
        detail: dict[str, JsonValue] = {"surplus": surplus} if rule.quota else {}
        if work.solve_rate_term:
            [reward] = (each for each in self._scoring.rewards if each.term == work.solve_rate_term)
            rates = measure_solve_rates(scores, reward)
            detail["solve_rates"] = {"rows": [*rates], "rates": [*rates.values()]}
        return Outcome(
            shards=(ref,),
            metrics=credit.metrics,
            detail=detail or None,
            timings={"credit_seconds": time.perf_counter() - started},
        )

    def compare_rewards(self, work: ComparisonWork) -> Outcome:
        """Return statistics on how rewards that were computed again differ from the stored rewards of the same
        completions."""
        return Outcome(
            metrics=compare_rewards(
                read_total_rewards(self._store, work.stored), read_total_rewards(self._store, work.new)
            )
        )

    def compare_advantages(self, work: ComparisonWork) -> Outcome:
        """Compare newly computed advantages with the stored ones that were trained on. Return statistics such as their
        correlation per token."""
        stored, new = (read_rewards(self._store, refs) for refs in (work.stored, work.new))
        return Outcome(metrics=compare_advantages(stored, new))

    def excerpts(self, work: ExcerptWork) -> Excerpts:
        """Return shortened texts of a few completions for a report. Controllers (the processes that schedule work)
        receive no other content of shards."""
        return read_excerpts(self._store, work)

    def _count_informative(self, rollouts: pa.Table, scores: pa.Table, metric: str) -> int:
        """Count the groups of a shard that are informative, which means that their completions have unequal rewards.
        `metric` names the reward that is compared."""
        terms = term_columns(self._scoring)
        return len(informative_prompts(rollouts, scores, terms=terms, algorithm=self._algorithm, metric=metric))

    def _find_token_starts(self, rollouts: pa.Table, work: ScoringWork) -> list[list[int] | None]:
        """Return, for each completion, the character index in its text at which each token starts, or None if no reward
        term scores steps or tokens. Raises BadInput if the work unit does not name the policy's tokenizer."""
        if not self._scoring.process_terms:
            return [None] * rollouts.num_rows
        if work.tokenizer is None:
            raise BadInput(
                f"the rewards {', '.join(self._scoring.process_terms)} score steps or tokens, so the scoring work "
                "unit must name the policy's tokenizer, but it does not"
            )
        if self._tokenizer is None or self._tokenizer[0] != work.tokenizer.digest:
            tokenizer = open_tokenizer(fetch_bundle_file(self._store, work.tokenizer, "tokenizer.json"))
            self._tokenizer = work.tokenizer.digest, tokenizer
        rows = zip(*(rollouts[name].to_pylist() for name in (COMPLETION_TOKENS, "completion")), strict=True)
        return [find_token_starts(self._tokenizer[1], tokens, text) for tokens, text in rows]

    def _read_verdicts(
        self, rollouts: pa.Table, work: ScoringWork
    ) -> dict[str, Sequence[Judgement | StepValues | Spans]]:
        """Read the verdicts that judges and reward models have written for the shard, keyed by reward term. Raises
        BadInput if the verdicts of a term are missing."""
        served = self._scoring.model_rewards
        shards = {verdicts.term: verdicts.verdicts for verdicts in work.verdicts}
        if set(shards) != set(served) or len(shards) < len(work.verdicts):
            present = ", ".join(verdicts.term for verdicts in work.verdicts) or "none"
            raise BadInput(
                "a scoring work unit must contain one shard of verdicts for each of "
                f"{', '.join(served) or 'no reward'}, but it contains {present}"
            )
        return {
            term: _tally_verdicts(read_shard(self._store, shards[term]), rollouts, reward, term=term)
            for term, reward in served.items()
        }

    def progress(self) -> int:
        """Return the number of completions that were scored or got credit. If the number stops growing, the worker is
        stuck."""
        return self._evaluator.done + self._code.done + self._credited

    def close(self) -> None:
        """End the processes that run reward code. The next work unit starts new processes."""
        self._evaluator.close()
        self._code.close()


def _build_cases(
    rollouts: pa.Table,
    starts: Sequence[Sequence[int] | None],
    episodes: Sequence[Sequence[TurnRecord]],
    *,
    iteration: int,
) -> list[Case]:
    columns = (rollouts[name].to_pylist() for name in (*PLACES, *TEXTS, "messages"))
    rows = zip(*columns, image_digests(rollouts), starts, episodes, strict=True)
    return [
        Case(
            *(prompt, completion, answer, None if begins is None else split_tokens(begins, completion)),
            where=f"iteration {iteration}, prompt {prompt_row}, sample {sample}",
            images=images,
            messages=tuple(messages or ()),
            turns=find_turn_starts(turns),
            turn_texts=find_turn_texts(turns, messages or ()),
        )
        for prompt_row, sample, prompt, completion, answer, messages, images, begins, turns in rows
    ]


def _check_max_missing(scores: pa.Table, work: ScoringWork) -> None:
    if work.max_missing is None or scores["reward"].null_count <= work.max_missing:
        return
    [(reason, count)] = Counter(scores["error"].drop_null().to_pylist()).most_common(1)
    raise Quarantined(
        f"iteration {work.iteration}: {scores['reward'].null_count} of the {scores.num_rows} completions of a shard "
        f"have no score, but scoring.max_missing allows only {work.max_missing} more in this iteration. The most "
        f"frequent reason ({format_count(count, 'time')}) is: {reason}"
    )


def _tally_verdicts(
    verdicts: pa.Table, rollouts: pa.Table, reward: ServedReward, *, term: str
) -> Sequence[Judgement | StepValues]:
    if reward.steps_verdict is not None:
        return tally_steps(verdicts, rollouts, verdict=reward.steps_verdict, term=term)
    if reward.model_steps is not None:
        return read_step_values(verdicts, rollouts, steps=reward.model_steps, term=term)
    return tally(verdicts, rollouts, vote=reward.vote, term=term)


def build_credit_rule(work: CreditWork, scoring: ScoringConfig, algorithm: AlgorithmConfig) -> CreditRule:
    """Return the settings for computing credit (advantages) from the work unit's rewards by the configured
    algorithm."""
    return CreditRule(
        terms=term_columns(scoring),
        algorithm=algorithm,
        quota=read_group_quota(work, scoring.terms),
        policy_version=work.policy_version,
        max_new_tokens=work.max_new_tokens,
        kl_coefficient=work.kl_coefficient,
        sample_term=work.sample_term,
    )


def read_group_quota(work: CreditWork, terms: Sequence[str]) -> GroupQuota | None:
    """Return the number of informative groups (groups with unequal rewards) that dynamic sampling requires, with the
    settings to count them. Return None if every group is used."""
    if work.dynamic is None:
        return None
    assert work.target is not None, "dynamic sampling has a target"
    return GroupQuota(
        target=work.target, metric=work.dynamic.metric or terms[0], fill=work.dynamic.on_shortfall == "fill"
    )


def check_shortfall(credit: Credit, work: CreditWork) -> None:
    """Raise Quarantined if too few groups are informative (have unequal rewards) and the configuration treats this as a
    failure."""
    if work.dynamic is None or work.dynamic.on_shortfall != "fail" or not credit.metrics["shortfall_groups"]:
        return
    informative, issued = (int(credit.metrics[name]) for name in ("informative_groups", "issued_groups"))
    raise Quarantined(
        f"iteration {work.iteration}: only {informative} of {issued} groups are informative (have different rewards) "
        f"after the last wave, but rollout.prompts needs {work.target}, and rollout.dynamic.on_shortfall is 'fail'. "
        "Use problems that are solved sometimes, raise rollout.dynamic.max_extra_waves, or set on_shortfall = 'fill'"
    )


def check_missing(credit: Credit, *, max_missing: float, iteration: int) -> None:
    """Raise Quarantined if the share of completions without a score exceeds `max_missing`."""
    if credit.metrics["missing_fraction"] <= max_missing:
        return
    [(reason, count)] = credit.errors.most_common(1)
    missing, completions = int(credit.metrics["missing"]), int(credit.metrics["completions"])
    raise Quarantined(
        f"iteration {iteration}: {missing} of {completions} completions have no score, but scoring.max_missing allows "
        f"at most {max_missing:.1%}. The most frequent reason ({format_count(count, 'time')}) is: {reason}"
    )
