"""Scores, completion lengths and prompts of an evaluation, read from its shards to compare champion and challenger."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isnan, nan
from statistics import fmean

import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.models.data.problems import identity
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import policy_of
from rheostat.tasks.promotion.suites import Suite
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import PROMPTS, StageKey, evaluation_key
from rheostat.tasks.views.metrics import Accuracy, accuracy_of


@dataclass(frozen=True, slots=True)
class SuiteAnswers:
    """Completions of one policy for the problems of an evaluation suite, with their scores."""

    policy: str
    """Digest of the policy."""
    scores: dict[str, dict[str, list[float]]]
    """Scores of the completions of each problem, as `scores[reward term][prompt_id]`. NaN marks a missing score."""
    accuracy: Accuracy
    """Accuracy that the evaluation reported, with pass@k if scores are 0 or 1."""
    tokens: float
    """Mean number of tokens of a completion."""
    cut_off: float
    """Fraction of the completions that were cut off at the maximum length."""
    problems: dict[str, str]
    """Digest of each problem's text, images and columns, by prompt_id."""

    @property
    def digest(self) -> str:
        """Digest of all problems of the suite, which shows whether two evaluations used the same problems in any
        order."""
        return blake3("\n".join(sorted(self.problems.values())).encode()).hexdigest()


def read_answers(suite: Suite, side: str) -> SuiteAnswers:
    """Read the completions and scores of the policy labeled `side` on a suite. The evaluation of the policy must be
    finished."""
    run = open_run(suite.retrain.store, suite.run_name(side))
    batch = Batch.read(run, evaluation_key(0))
    rollouts = _read_columns(run, batch.rollout_manifests, ["completion_tokens", "finish_reason"])
    terms = suite.scoring.terms
    scores = problem_scores(batch, terms)
    return SuiteAnswers(
        policy=policy_of(batch.policy).digest,
        scores=scores,
        accuracy=accuracy_of(run.require(StageKey.of(evaluation_key(0), "summary"))),
        tokens=pc.mean(pc.list_value_length(rollouts["completion_tokens"])).as_py(),
        cut_off=pc.mean(pc.equal(rollouts["finish_reason"], FinishReason.LENGTH)).as_py(),
        problems={name: problem for name, problem in prompt_identities(run, "heldout") if name in scores[terms[0]]},
    )


def mean_score(answers: SuiteAnswers, term: str | None) -> tuple[float, float]:
    """Return the mean score of all completions for a reward (by default the suite's first), and the fraction of
    missing scores."""
    scores = list(chain(*answers.scores[term or next(iter(answers.scores))].values()))
    known = [score for score in scores if not isnan(score)]
    return fmean(known) if known else 0.0, 1 - len(known) / len(scores)


def problem_scores(batch: Batch, terms: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return the scores of the completions of each problem, as `scores[reward term][prompt_id]`. NaN marks a missing
    score."""
    names = _read_columns(batch.run, batch.rollout_manifests, ["prompt_id"])["prompt_id"].to_pylist()
    values = _read_columns(batch.run, batch.stage_manifests("scoring"), [f"reward_{term}" for term in terms])
    return {term: _group_by_problem(names, values[f"reward_{term}"]) for term in terms}


def _group_by_problem(names: list[str], values: pa.ChunkedArray) -> dict[str, list[float]]:
    scores = dict[str, list[float]]()
    for name, value in zip(names, values.cast(pa.float64()).fill_null(nan).to_pylist(), strict=True):
        scores.setdefault(name, []).append(value)
    return scores


def prompt_identities(run: Run, split: str) -> Iterator[tuple[str, str]]:
    """Yield the prompt_id of each prompt of a run with a digest of the prompt's text, images and columns."""
    table = read_shard(run.store, run.require(PROMPTS[split]).shards[0], ["prompt_id", "text", "images", "columns"])
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            yield row["prompt_id"], identity(row["text"], row["images"], json.loads(row["columns"]))


def _read_columns(run: Run, manifests: Sequence[Manifest], names: list[str]) -> pa.Table:
    """Return some columns of a stage's stored tables as one table. Rows are sorted by problem, then by sample."""
    return pa.concat_tables(read_shard(run.store, manifest.shards[0]).select(names) for manifest in manifests)
