"""The worker that judges completions and turns rewards into training samples. Torch-free."""

import math
import time
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from infra.errors import Quarantined
from infra.shards import read_shard, write_shard
from infra.storage import open_store
from models.config import AlgorithmConfig
from models.credit import ROLLOUT_COLUMNS, Credit, assign_credit
from models.records import Outcome, score_schema
from models.rewards.config import ScoringConfig
from models.rewards.evaluate import Case, Evaluator, Verdict
from models.work import CreditWork, ScoringWork


class ScoringWorker:
    """Keeps the process that runs rewards warm between works; hosted by a pool, or used as it is."""

    def __init__(self, store_uri: str, run: str, scoring: ScoringConfig, algorithm: AlgorithmConfig) -> None:
        self._store = open_store(f"{store_uri}/{run}")
        self._scoring = scoring
        self._algorithm = algorithm
        self._evaluator = Evaluator(scoring)
        self._credited = 0

    def score(self, work: ScoringWork) -> Outcome:
        """Judge every completion of a rollout shard: one score shard with the same rows."""
        began = time.perf_counter()
        rollouts = read_shard(self._store, work.rollouts, ("prompt_row", "sample", "prompt", "completion", "answer"))
        texts = (rollouts[name].to_pylist() for name in ("prompt", "completion", "answer"))
        verdicts = self._evaluator.evaluate([Case(*row) for row in zip(*texts, strict=True)])
        table = score_table(rollouts, verdicts, self._scoring)
        metadata = {"iteration": str(work.iteration), "rollouts": work.rollouts.digest}
        ref = write_shard(self._store, table, kind="scores", metadata=metadata)
        timings = {"score_seconds": time.perf_counter() - began}
        return Outcome(shards=(ref,), metrics=score_metrics(table, self._scoring.terms), timings=timings)

    def credit(self, work: CreditWork) -> Outcome:
        """Turn an iteration's rollouts and scores into one sample shard, or refuse if too many are missing."""
        began = time.perf_counter()
        credit = assign_credit(
            [read_shard(self._store, ref, ROLLOUT_COLUMNS) for ref in work.rollouts],
            [read_shard(self._store, ref) for ref in work.scores],
            terms=self._scoring.terms,
            algorithm=self._algorithm,
        )
        check_missing(credit, max_missing=self._scoring.max_missing, iteration=work.iteration)
        metadata = {"iteration": str(work.iteration)}
        ref = write_shard(self._store, credit.samples, kind="samples", metadata=metadata)
        self._credited += int(credit.metrics["completions"])
        timings = {"credit_seconds": time.perf_counter() - began}
        return Outcome(shards=(ref,), metrics=credit.metrics, timings=timings)

    def progress(self) -> int:
        """Count completions judged and credited; it moves while work advances."""
        return self._evaluator.done + self._credited

    def close(self) -> None:
        """Kill the process that runs rewards; the next work starts another."""
        self._evaluator.close()


def score_table(rollouts: pa.Table, verdicts: Sequence[Verdict], scoring: ScoringConfig) -> pa.Table:
    """Put verdicts beside the completions they judge; one missing term makes the total missing."""
    totals = [_total(verdict, scoring) for verdict in verdicts]
    columns = {
        "prompt_row": rollouts["prompt_row"],
        "sample": rollouts["sample"],
        "reward": pa.array([reward for reward, _ in totals], pa.float64()),
        **{
            f"reward_{term}": pa.array([verdict.values[index] for verdict in verdicts], pa.float64())
            for index, term in enumerate(scoring.terms)
        },
        "error": pa.array([error for _, error in totals], pa.string()),
    }
    return pa.table(columns, schema=score_schema(scoring.terms))


def score_metrics(table: pa.Table, terms: Sequence[str]) -> dict[str, float]:
    """Count rows and missing scores, and sum what is there and its squares; sums, unlike means, add up over shards."""
    scored = table.filter(pc.is_valid(table["reward"]))  # a term may have a value where a later one failed
    values = {term: scored[f"reward_{term}"].to_pylist() for term in terms}
    return {
        "count": float(table.num_rows),
        "missing": float(table["reward"].null_count),
        "reward_sum": math.fsum(scored["reward"].to_pylist()),
        **{f"term_{term}_sum": math.fsum(numbers) for term, numbers in values.items()},
        **{f"term_{term}_squares": math.fsum(number**2 for number in numbers) for term, numbers in values.items()},
    }


def check_missing(credit: Credit, *, max_missing: float, iteration: int) -> None:
    """Raise Quarantined if more completions have no score than the configuration puts up with."""
    if credit.metrics["missing_fraction"] <= max_missing:
        return
    [(reason, count)] = credit.errors.most_common(1)
    missing, completions = int(credit.metrics["missing"]), int(credit.metrics["completions"])
    raise Quarantined(
        f"credit of iteration {iteration}: {missing} of {completions} completions have no score, "
        f"expected at most {max_missing:.1%} (scoring.max_missing); most often ({count} times): {reason}"
    )


def _total(verdict: Verdict, scoring: ScoringConfig) -> tuple[float | None, str | None]:
    weighted = [
        reward.weight * value
        for reward, value in zip(scoring.rewards, verdict.values, strict=True)
        if value is not None
    ]
    if len(weighted) < len(scoring.rewards):
        return None, verdict.error
    total = sum(weighted)
    return (total, None) if math.isfinite(total) else (None, f"total: the weighted sum is {total}")
