"""Time of advantages per algorithm, and of credit as a whole, for 100,000 completions of log-normal lengths."""

import statistics
import time

import numpy as np
import pyarrow as pa

from bench.tables import Table
from rheostat.models.algorithms.advantages import informative_groups, token_advantages
from rheostat.models.algorithms.experience import AuxiliaryScores, Experience, ScoredGroups, SpanColumns, Term
from rheostat.models.config.algorithms import (
    AlgorithmConfig,
    Capo,
    DistillationOnly,
    DrGrpo,
    Grpo,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RewardKl,
    Rloo,
)
from rheostat.models.config.teachers import Distillation, TeacherDirectory
from rheostat.models.credit.assign import CreditRule, credit_completions
from rheostat.models.credit.inputs import TermColumns
from rheostat.models.records.columns import Integers, lists
from rheostat.models.records.schemas import score_schema

COMPLETIONS, GROUP, MEAN_TOKENS, SIGMA = 100_000, 8, 100, 0.8
STEP_TOKENS = 20
ROUNDS = 3
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "grpo": Grpo(),
    "grpo, terms one by one, KL in the reward": Grpo(combine="normalise_then_sum", kl=RewardKl(kind="k3")),
    "dr_grpo": DrGrpo(),
    "rloo": Rloo(),
    "reinforce_pp": ReinforcePlusPlus(kl=RewardKl()),
    "reinforce_pp_baseline": ReinforcePlusPlusBaseline(),
    "ppo": Ppo(),
    "capo": Capo(),
    "distillation": DistillationOnly(distillation=Distillation(teacher=TeacherDirectory(path="teacher"))),
}


def measure() -> list[Table]:
    """Measure the seconds that each algorithm takes to compute advantages and credit.

    Return a table with one row per algorithm. Columns are in memory, as after reading a shard, and nothing is written.
    """
    batch, rows = experience(), []
    for name, algorithm in ALGORITHMS.items():
        durations = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            informative_groups(batch.scored, algorithm)
            token_advantages(batch, algorithm)
            durations.append(time.perf_counter() - started)
        rows.append((name, statistics.median(durations), _credit_seconds(batch, algorithm)))
    tokens = len(batch.logprobs_T)
    return [
        Table(
            title=f"Advantages: {COMPLETIONS:,} completions, {tokens:,} tokens, groups of {GROUP}, median of {ROUNDS}",
            columns=("algorithm", "advantages (s)", "whole credit (s)"),
            rows=tuple(rows),
            notes=(
                "advantages: informative groups and advantages, computed from columns in memory",
                "whole credit: from tables to a table (checks, staleness, sorting by prompt), measured once",
            ),
        )
    ]


def experience() -> Experience:
    """Build random training data: completions with rewards, flagged steps, and outputs of auxiliary models."""
    random = np.random.default_rng(0)
    lengths_N = np.maximum(random.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, COMPLETIONS), 1).astype(np.int64)
    tokens = int(lengths_N.sum())
    policy_T = random.normal(-1, 1, tokens)
    outcome_N = random.integers(0, 2, COMPLETIONS).astype(np.float64)
    spans = _steps(lengths_N, random)
    flags_N = np.bincount(np.repeat(np.arange(COMPLETIONS), spans.counts_N), weights=spans.values_S) / spans.counts_N
    terms = (Term("numeric", 2.0, outcome_N), Term("steps", 1.0, flags_N, spans))
    prompts = COMPLETIONS // GROUP
    scored = ScoredGroups(
        prompts_G=np.arange(prompts),
        group_N=np.repeat(np.arange(prompts), GROUP),
        lengths_N=lengths_N,
        total_N=2 * outcome_N + flags_N,
        terms=terms,
    )
    return Experience(
        scored=scored,
        logprobs_T=policy_T,
        counted_N=np.ones(COMPLETIONS, np.bool_),
        auxiliary_scores=AuxiliaryScores(*(policy_T + random.normal(0, 0.1, tokens) for _ in range(4))),
        kl_coefficient=1e-2,
    )


def _steps(lengths_N: Integers, random: np.random.Generator) -> SpanColumns:
    counts_N = -(-lengths_N // STEP_TOKENS)
    firsts_S = np.arange(counts_N.sum()) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
    return SpanColumns(STEP_TOKENS * firsts_S, counts_N, -(random.random(len(firsts_S)) < 0.1).astype(np.float64))


def _credit_seconds(batch: Experience, algorithm: AlgorithmConfig) -> float:
    terms = (TermColumns("numeric", 2.0), TermColumns("steps", 1.0, is_process=True))
    rule = CreditRule(terms=terms, algorithm=algorithm, kl_coefficient=batch.kl_coefficient)
    rollouts, scores, estimates = _tables(batch)
    started = time.perf_counter()
    credit_completions([rollouts], [scores], rule, auxiliary_scores=[estimates])
    return time.perf_counter() - started


def _tables(batch: Experience) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Convert the experience to Arrow tables: rollouts, scores, and per-token outputs of auxiliary models."""
    scored, models = batch.scored, batch.auxiliary_scores
    lengths_N, spans = scored.lengths_N, scored.terms[1].spans
    assert spans is not None
    places = {
        "prompt_row": pa.array(scored.group_N.astype(np.int32)),
        "sample": pa.array((np.arange(COMPLETIONS) % GROUP).astype(np.int16)),
    }
    ones_N = np.ones(COMPLETIONS, np.int64)
    segments = pa.StructArray.from_arrays(
        [pa.array(np.zeros(COMPLETIONS, np.int32)), pa.array(lengths_N.astype(np.int32))], ["policy_version", "tokens"]
    )
    tokens = lists(np.zeros(int(lengths_N.sum()), np.int32), lengths_N)
    rollouts = pa.table(
        {
            **places,
            "prompt_tokens": lists(np.zeros(COMPLETIONS, np.int32), ones_N),
            "completion_tokens": tokens,
            "logprobs": lists(batch.logprobs_T.astype(np.float32), lengths_N),
            "finish_reason": pa.array(["stop"] * COMPLETIONS),
            "segments": pa.ListArray.from_arrays(pa.array(np.arange(COMPLETIONS + 1, dtype=np.int32)), segments),
        }
    )
    scores = {
        **places,
        "reward": pa.array(scored.total_N),
        "reward_numeric": pa.array(scored.terms[0].rewards_N),
        "reward_steps": pa.array(scored.terms[1].rewards_N),
        "error": pa.nulls(COMPLETIONS, pa.string()),
        "spans_steps": lists(spans.starts_S.astype(np.int32), spans.counts_N),
        "values_steps": lists(spans.values_S, spans.counts_N),
    }
    names = {"policy": models.policy_T, "reference": models.reference_T, "teacher": models.teacher_T}
    columns = {**names, "values": models.values_T}
    estimates = {
        name: lists(values.astype(np.float32), lengths_N) for name, values in columns.items() if values is not None
    }
    return (
        rollouts,
        pa.table(scores, schema=score_schema(("numeric", "steps"), ("steps",))),
        pa.table({**places, **estimates}),
    )
