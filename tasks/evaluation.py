"""Accuracy of held-out evaluations: computed from the scores of all problems, then stored and logged."""

import logging
from collections.abc import Mapping, Sequence

from rheostat.infra.costs import Cost
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.shards import read_shard
from rheostat.models.rewards.scores import problem_metrics
from rheostat.tasks.costs import compute_costs, read_reservation
from rheostat.tasks.events import emit_of_run
from rheostat.tasks.preparation import FROM_STORE_SUFFIX
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import append_to_chain, commit_decision, controller_provenance
from rheostat.tasks.views.metrics import Accuracy, accuracy_of

logger = logging.getLogger(__name__)


def is_summarized(batch: Batch) -> bool:
    """Return whether the accuracy of an evaluation is already stored in the run."""
    return batch.run.find(StageKey.of(batch.key, "summary")) is not None


async def summarize_evaluation(open_run: OpenRun, batch: Batch) -> Accuracy:
    """Store the accuracy and costs of an evaluation after all problems are scored, log the accuracy, and return it."""
    is_stored = is_summarized(batch)
    costs = {} if is_stored else compute_costs(open_run, [batch], await read_reservation(open_run))
    open_run.account.add(costs)
    accuracy = _commit_accuracy(open_run, batch, costs)
    append_to_chain(open_run, batch.key)
    if not is_stored:
        payload = accuracy.model_dump(include={"mean", "low", "high", "problems"})
        emit_of_run(open_run.run.name, "evaluation.made", iterations=accuracy.number, **payload)
    # the last accuracy is part of the summary
    if accuracy.number == 0 or accuracy.number < open_run.settings.iterations:
        suffix = FROM_STORE_SUFFIX if is_stored else ""
        logger.info("held-out accuracy after %d iterations: %s%s", accuracy.number, accuracy.line(), suffix)
    return accuracy


def summarize_measurement(open_run: OpenRun, batch: Batch) -> Accuracy:
    """Store, log and return the accuracy of a policy that was evaluated before the first iteration."""
    accuracy = _commit_accuracy(open_run, batch, {})
    logger.info("held-out accuracy of %s: %s", batch.plan.policy, accuracy.line())
    return accuracy


def _commit_accuracy(open_run: OpenRun, batch: Batch, costs: Mapping[str, Cost]) -> Accuracy:
    scores, term = batch.stage_manifests("scoring"), open_run.settings.scoring.terms[0]
    manifest = commit_decision(
        open_run,
        StageKey.of(batch.key, "summary"),
        parents=[batch.plan_manifest, *scores],
        metrics=_sum_scores(scores, term) if batch.plan.group_size == 1 else _average_problems(open_run, batch, term),
        provenance=controller_provenance(costs=costs),
    )
    return accuracy_of(manifest, temperature=open_run.settings.evaluation.temperature)


def _sum_scores(scores: Sequence[Manifest], term: str) -> dict[str, float]:
    """Return the metrics "accuracy", "squares" (sum of squared scores) and "problems" (number of problems with a
    score), for an evaluation with one completion per problem."""
    total = sum(m.metrics[f"term_{term}_sum"] for m in scores)
    squares = sum(m.metrics[f"term_{term}_squares"] for m in scores)
    problems = int(sum(m.metrics["count"] - m.metrics["missing"] for m in scores))
    return {"accuracy": total / problems if problems else 0.0, "squares": squares, "problems": problems}


def _average_problems(open_run: OpenRun, batch: Batch, term: str) -> dict[str, float]:
    """Return the metrics "accuracy", "squares" and "problems" for an evaluation with several completions per
    problem.

    Scores are averaged per problem first, because completions of one problem are not independent.
    """
    columns = ["prompt_row", "reward", f"reward_{term}"]
    tables = (
        read_shard(open_run.run.store, manifest.shards[0], columns) for manifest in batch.stage_manifests("scoring")
    )
    return problem_metrics(tables, term, samples=batch.plan.group_size)
