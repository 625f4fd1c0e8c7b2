"""Tables of one run for SQL queries: scores, samples (advantages), iterations and policies. The export builds the table
`rollouts`.

Needs neither Prefect's API nor a worker.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import duckdb
import pyarrow as pa

from rheostat.infra.config import read_recorded
from rheostat.infra.costs import total
from rheostat.infra.store.bundles import has_bundle
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.schemas import VERDICT_SCHEMA
from rheostat.models.records.versions import policy_of
from rheostat.tasks.run.batch import iterations_without_rollouts, rollouts_of
from rheostat.tasks.run.keys import StageKey, iteration_key, reward_model_role
from rheostat.tasks.run.rescorings import DerivedResult, Kind, list_derived_results, rescoring_terms
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.views.metrics import sealed_iterations

PLACE: Final = ("prompt_row", "sample")
VERDICT: Final = pa.struct([VERDICT_SCHEMA.field(name) for name in VERDICT_SCHEMA.names[2:]])
SCORES: Final = pa.schema(
    [
        ("run", pa.string()),
        ("iteration", pa.int32()),
        ("rescoring", pa.string()),  # name of the rescoring; null for the scores that the run trained on
        ("prompt_row", pa.int32()),
        ("sample", pa.int16()),
        ("term", pa.string()),
        ("value", pa.float64()),  # before the weight of the term; null = missing
        ("reward", pa.float64()),  # weighted sum of all terms; null = missing
        ("error", pa.string()),  # first error of the completion
        # verdicts of the model behind the term, by vote and attempt; null if no model scores the term
        ("verdicts", pa.list_(VERDICT)),
    ]
)
CREDIT: Final = """
    select $run as run, $iteration::int as iteration, $name::varchar as recredit, prompt_row, sample,
        num_prompt_tokens as prompt_tokens, len(written) as tokens, list_avg(written) as advantage_mean,
        list_min(written) as advantage_min, list_max(written) as advantage_max, list_max(staleness) as staleness
    from (select *, list_filter(advantages, lambda advantage, place: staleness[place] >= 0) as written from samples)
"""
"""SQL query that computes one row per training sample, with the mean, minimum and maximum advantage of the tokens that
the policy generated."""


def _iteration_tables(run: Run) -> Iterator[pa.Table]:
    """Yield one table with a row for each completed iteration: its metrics, seconds per stage and costs."""
    rows: list[dict[str, object]] = []
    for number, sealed in enumerate(sealed_iterations(run), start=1):
        provenance, metrics = sealed.provenance, {name.replace("/", "_"): each for name, each in sealed.metrics.items()}
        seconds = {f"seconds_{name}": value for name, value in provenance.seconds.items()}
        cost = total(provenance.costs.values())
        costs = {f"cost_{name}": value for name, value in {**cost.model_dump(), "tokens": cost.tokens}.items()}
        policy = {"run": run.name, "iteration": number, "policy": sealed.detail["policy"]}
        rows.append({**policy, **metrics, **seconds, **(costs if provenance.costs else {})})
    columns = dict.fromkeys(name for row in rows for name in row)
    yield pa.table({name: [row.get(name) for row in rows] for name in columns})


def _policy_tables(run: Run) -> Iterator[pa.Table]:
    """Yield one table with a row for each version of the policy, starting with the initial policy."""
    rows: list[dict[str, object]] = []
    for number in range(len(sealed_iterations(run)) + 1):
        policy = policy_of(policy_after(run, number))
        files = [bundle for bundle in (policy.adapter, policy.weights) if bundle is not None]
        rows.append(
            {
                "run": run.name,
                "version": policy.version,
                "iteration": number or None,
                "policy": policy.digest,
                "parent": rows[-1]["policy"] if rows else None,
                "bytes": files[0].bytes,
                "state_bytes": None if policy.state is None else policy.state.bytes,
                "is_there": all(has_bundle(run.store, bundle) for bundle in files),
            }
        )
    yield pa.Table.from_pylist(rows)


def _sample_tables(run: Run) -> Iterator[pa.Table]:
    """Yield tables with a row for each training sample and its advantages: those that the run trained on, and
    advantages that were computed again (recredits)."""
    for number, name, prefix in _stored_iterations(run, "recredit"):
        credit = run.require(StageKey.of(iteration_key(number), "credit").with_prefix(prefix))
        values = {"run": run.name, "iteration": number, "name": name}
        columns = ("prompt_row", "sample", "num_prompt_tokens", "advantages", "staleness")
        for shard in credit.shards:
            with duckdb.connect() as database:
                database.register("samples", read_shard(run.store, shard, columns))
                yield database.execute(CREDIT, values).to_arrow_table()


def _score_tables(run: Run) -> Iterator[pa.Table]:
    """Yield tables with a row for each reward term of each completion: scores that the run trained on, and scores that
    were computed again (rescorings)."""
    own = read_recorded(ScoringConfig, run.record.config["scoring"])
    for number, name, prefix in _stored_iterations(run, "rescore"):
        again = None if name is None else rescoring_terms(run, name)
        for rollouts in rollouts_of(run, number):
            for term in (own if again is None else again.scoring).terms:
                table = _term_table(run, StageKey.parse(rollouts.key), term, prefix=prefix)
                place = {"run": run.name, "iteration": number, "rescoring": name, "term": term}
                columns = {column: [value] * table.num_rows for column, value in place.items()}
                yield pa.table(columns | dict(zip(table.column_names, table.columns, strict=True)), schema=SCORES)


def _term_table(run: Run, rollouts: StageKey, term: str, *, prefix: str) -> pa.Table:
    """Return the values of one reward term for the completions of a shard, with the verdicts if a model computes the
    term."""
    scored = run.require(rollouts.with_stage("scoring").with_prefix(prefix))
    scores = read_shard(run.store, scored.shards[0], (*PLACE, "reward", f"reward_{term}", "error"))
    judged, verdict_lists = run.find(rollouts.with_stage(reward_model_role(term)).with_prefix(prefix)), None
    if judged is not None:
        by_completion = _verdicts_by_completion(read_shard(run.store, judged.shards[0]))
        verdict_lists = [
            by_completion[place] for place in zip(*(scores[name].to_pylist() for name in PLACE), strict=True)
        ]
    columns = {name: scores[name] for name in (*PLACE, "reward", "error")}
    verdicts = pa.nulls(scores.num_rows) if verdict_lists is None else pa.array(verdict_lists, pa.list_(VERDICT))
    return pa.table({**columns, "value": scores[f"reward_{term}"], "verdicts": verdicts})


def _verdicts_by_completion(table: pa.Table) -> Mapping[tuple[int, int], list[dict[str, object]]]:
    """Return the verdicts of a judge, grouped by completion (prompt row and sample). Verdicts on canaries (known-bad
    test completions) have keys that match no completion."""
    by_completion: dict[tuple[int, int], list[dict[str, object]]] = defaultdict(list)
    for row in table.to_pylist():
        by_completion[row.pop("prompt_row"), row.pop("sample")].append(row)
    return by_completion


def _stored_iterations(run: Run, kind: Kind) -> Iterator[tuple[int, str | None, str]]:
    """Yield (iteration, name, prefix of keys) for each completed iteration whose shards are stored. The run itself
    comes first and has no name and no prefix. After that, the same iteration is yielded for each rescoring or
    recredit, with its name."""
    numbers = range(1, len(sealed_iterations(run)) + 1)
    deleted, derived = (
        iterations_without_rollouts(run, numbers),
        [line for line in list_derived_results(run) if line.kind == kind],
    )
    for number in (number for number in numbers if number not in deleted):
        yield number, None, ""
        for line in derived:
            if number in line.iterations:
                yield number, line.name, DerivedResult(kind, line.name).prefix


TABLES: Final[Mapping[str, Callable[[Run], Iterator[pa.Table]]]] = {
    "scores": _score_tables,
    "samples": _sample_tables,
    "iterations": _iteration_tables,
    "policies": _policy_tables,
}
"""Functions that build the tables for a SQL query, by name of the view. All tables of a view have the same columns."""
