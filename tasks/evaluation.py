"""Results of held-out evaluations."""

import logging
from collections.abc import Mapping, Sequence

from infra.costs import Cost
from infra.store.manifests import Manifest
from infra.store.shards import read_shard
from models.rewards.scores import problem_metrics
from tasks.costs import costs_of, read_reservation
from tasks.events import emit_of_run
from tasks.preparation import FROM_STORE
from tasks.run.batch import Batch
from tasks.run.keys import StageKey
from tasks.run.session import Session
from tasks.run.stages import decided_here, finish, record
from tasks.views.metrics import Accuracy, accuracy_of

logger = logging.getLogger(__name__)


def is_summarized(batch: Batch) -> bool:
    """Return whether an evaluation's accuracy is committed."""
    return batch.run.find(StageKey.of(batch.key, "summary")) is not None


async def summarize_evaluation(session: Session, batch: Batch) -> Accuracy:
    """Commit the accuracy of an evaluated policy, log it, and return it."""
    is_stored = is_summarized(batch)
    costs = {} if is_stored else costs_of(session, [batch], await read_reservation(session))
    session.account.add(costs)
    accuracy = _commit_accuracy(session, batch, costs)
    finish(session, batch.key)
    if not is_stored:
        payload = accuracy.model_dump(include={"mean", "low", "high", "problems"})
        emit_of_run(session.run.name, "evaluation.made", iterations=accuracy.number, **payload)
    # the last accuracy is part of the summary
    if accuracy.number == 0 or accuracy.number < session.settings.iterations:
        suffix = FROM_STORE if is_stored else ""
        logger.info("held-out accuracy after %d iterations: %s%s", accuracy.number, accuracy.line(), suffix)
    return accuracy


def summarize_measurement(session: Session, batch: Batch) -> Accuracy:
    """Commit the accuracy of a policy from before the first iteration, log it, and return it."""
    accuracy = _commit_accuracy(session, batch, {})
    logger.info("held-out accuracy of %s: %s", batch.plan.policy, accuracy.line())
    return accuracy


def _commit_accuracy(session: Session, batch: Batch, costs: Mapping[str, Cost]) -> Accuracy:
    scores, term = batch.stage("scoring"), session.settings.scoring.terms[0]
    manifest = record(
        session,
        StageKey.of(batch.key, "summary"),
        parents=[batch.planned, *scores],
        metrics=_sum_scores(scores, term) if batch.plan.group_size == 1 else _average_problems(session, batch, term),
        provenance=decided_here(costs=costs),
    )
    return accuracy_of(manifest, temperature=session.settings.evaluation.temperature)


def _sum_scores(scores: Sequence[Manifest], term: str) -> dict[str, float]:
    """Return accuracy, sum of squares and number of problems for evaluations with one completion per problem."""
    total = sum(m.metrics[f"term_{term}_sum"] for m in scores)
    squares = sum(m.metrics[f"term_{term}_squares"] for m in scores)
    problems = int(sum(m.metrics["count"] - m.metrics["missing"] for m in scores))
    return {"accuracy": total / problems if problems else 0.0, "squares": squares, "problems": problems}


def _average_problems(session: Session, batch: Batch, term: str) -> dict[str, float]:
    """Return the metrics of `_sum_scores` for evaluations with several completions per problem.

    Scores are averaged per problem first, because completions of one problem are not independent.
    """
    columns = ["prompt_row", "reward", f"reward_{term}"]
    tables = (read_shard(session.run.store, manifest.shards[0], columns) for manifest in batch.stage("scoring"))
    return problem_metrics(tables, term, samples=batch.plan.group_size)
