"""What an evaluation says, read from its shards: scores, lengths, prompts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan

import pyarrow as pa
import pyarrow.compute as pc

from infra.store.manifests import Manifest
from infra.store.runs import Run, open_run
from infra.store.shards import read_shard
from models.data.problems import identity
from models.records.schemas import FinishReason
from models.records.versions import policy_of
from tasks.promotion.suites import Side, Suite
from tasks.run.batch import Batch
from tasks.run.keys import PROMPTS, evaluation_key


@dataclass(frozen=True, slots=True)
class SuiteAnswers:
    """What a policy answered to a suite's problems, and what it was worth."""

    policy: str
    """Digest of the policy."""
    scores: dict[str, list[float]]
    """Of a problem's samples, by prompt_id; NaN where one is missing."""
    tokens: float
    """Mean length."""
    cut_off: float
    """Share that the longest length cut off."""
    problems: dict[str, str]
    """Identities of the problems, by prompt_id."""


def answers_of(suite: Suite, side: Side) -> SuiteAnswers:
    """Read what a side answered, once it is evaluated."""
    run = open_run(suite.retrain.store, suite.run_name(side))
    batch, term = Batch.read(run, evaluation_key(0)), suite.scoring.terms[0]
    rollouts = _columns(run, batch.rollouts, ["prompt_id", "completion_tokens", "finish_reason"])
    values = _columns(run, batch.stage("scoring"), [f"reward_{term}"])[0].cast(pa.float64()).fill_null(nan)
    names, scores = rollouts["prompt_id"].to_pylist(), dict[str, list[float]]()
    for name, value in zip(names, values.to_pylist(), strict=True):
        scores.setdefault(name, []).append(value)
    return SuiteAnswers(
        policy=policy_of(batch.policy).digest,
        scores=scores,
        tokens=pc.mean(pc.list_value_length(rollouts["completion_tokens"])).as_py(),
        cut_off=pc.mean(pc.equal(rollouts["finish_reason"], FinishReason.LENGTH)).as_py(),
        problems={name: problem for name, problem in prompt_identities(run, "heldout") if name in scores},
    )


def prompt_identities(run: Run, split: str) -> Iterator[tuple[str, str]]:
    """Go through prompt_id and identity, which is text, images and columns, of a run's prompts."""
    table = read_shard(run.store, run.require(PROMPTS[split]).shards[0], ["prompt_id", "text", "images", "columns"])
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            yield row["prompt_id"], identity(row["text"], row["images"], json.loads(row["columns"]))


def _columns(run: Run, made: Sequence[Manifest], names: list[str]) -> pa.Table:
    """Some columns of what a stage made, shard by shard, in the order of its rows: by problem, then by sample."""
    return pa.concat_tables(read_shard(run.store, manifest.shards[0]).select(names) for manifest in made)
