"""Conflicts between the parts of a run's configuration: sizes, names of rewards, worker slots and timeouts.

Each function yields the reasons why parts do not fit together, as messages that name the keys. The conflicts between
the algorithm, its objectives and its data are in `rheostat.models.config.conflicts`.
"""

from collections.abc import Iterator

from rheostat.infra.config import PoolsConfig
from rheostat.infra.counts import format_count
from rheostat.infra.validation_errors import nearest
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.config.budget import BudgetConfig
from rheostat.models.config.data import DataConfig
from rheostat.models.config.endpoints import MAX_PAUSE_SECONDS, Endpoint
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.config.training import EvaluationConfig, RetentionConfig
from rheostat.placement.config import PlacementConfig


def find_size_conflicts(
    evaluation: EvaluationConfig, data: DataConfig, rollout: RolloutConfig, retention: RetentionConfig
) -> Iterator[str]:
    """Yield reasons why numbers of problems, tokens and stored versions are too large or too small together."""
    problems, limit = evaluation.problems, data.num_heldout_problems
    if limit is not None and problems > limit and "problems" in evaluation.model_fields_set:
        yield (
            f"evaluation.problems is {problems}, but data.options.heldout_problems is only {limit}. "
            "Lower the first, or raise the second."
        )
    if rollout.sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature is 0, at which all completions of a group are equal and nothing can be "
            "trained. Set it above 0."
        )
    partial, longest = rollout.partial, rollout.sampling.max_new_tokens
    if partial is not None and partial.tokens >= longest:
        yield (
            f"rollout.partial.tokens is {partial.tokens}, but it must be below rollout.sampling.max_new_tokens, which "
            f"is {longest}. Lower it."
        )
    stale, kept = rollout.staleness, retention.keep_last
    if kept < stale + 2:
        yield (
            f"retention.keep_last is {kept}, but with rollout.staleness = {stale} the last {stale + 2} policy "
            f"versions are needed. Set it to at least {stale + 2}."
        )


def find_name_conflicts(rollout: RolloutConfig, scoring: ScoringConfig, placement: PlacementConfig) -> Iterator[str]:
    """Yield reasons why a name in `rollout.dynamic`, `rollout.curriculum` or `placement.replicas` is not that of a
    suitable reward."""
    terms, local = scoring.terms, [*scoring.hosted_rewards]
    for key, table in (("dynamic", rollout.dynamic), ("curriculum", rollout.curriculum)):
        if table is not None and table.metric is not None and table.metric not in terms:
            yield (
                f"rollout.{key}.metric is {table.metric!r}, but it must be the name of a reward: "
                f"{', '.join(terms)}{nearest(table.metric, terms)}"
            )
    for term in placement.replicas:
        if term not in local:
            known = ", ".join(local) or "none"
            yield (
                f"placement.replicas contains {term!r}, which is not a reward whose model runs in worker slots. Such "
                f"rewards: {known}{nearest(term, local)}"
            )


def find_curriculum_conflicts(rollout: RolloutConfig, data: DataConfig) -> Iterator[str]:
    """Yield a reason if `rollout.curriculum` has no choice among prompts, and no files of a mixture whose weights it
    can change."""
    curriculum = rollout.curriculum
    if curriculum is None:
        return
    if curriculum.min_part_factor is None:
        if curriculum.candidates == 1:
            yield (
                "rollout.curriculum.candidates is 1, so there is no choice among prompts. Set it to 2 or more. To "
                "change only the weights of the files of a mixture, set rollout.curriculum.min_part_factor"
            )
    elif len(data.weights) < 2:
        yield (
            "rollout.curriculum.min_part_factor changes the weights of the files of a mixture, but the problems of "
            f"data.kind = {data.label!r} are not from several files with weights. Use data.kind = 'mixture' with "
            "several sources, or remove the key"
        )


def find_price_conflicts(budget: BudgetConfig, scoring: ScoringConfig) -> Iterator[str]:
    """Yield reasons why a name in `budget.prices.judges` is not that of a reward with a judge at an endpoint."""
    remote_terms = [term for term, reward in scoring.model_rewards.items() if reward.endpoint is not None]
    for term in budget.prices.judges:
        if term not in remote_terms:
            known = ", ".join(remote_terms) or "none"
            yield (
                f"budget.prices.judges contains {term!r}, which is not a reward with a judge behind an endpoint. Such "
                f"rewards: {known}{nearest(term, remote_terms)}"
            )


def find_controller_conflicts(pools: PoolsConfig, *, deployed: bool) -> Iterator[str]:
    """Yield a reason if controllers are `deployed` in other processes, which cannot reach the workers."""
    if pools.cluster == "threads" and deployed:
        yield (
            "controllers.where = 'deployment' runs controllers in other processes, which cannot reach the workers of "
            "pools.cluster = 'threads'. Set controllers.where = 'nested' or pools.cluster = 'ray'."
        )


def find_slot_conflicts(pools: PoolsConfig, placement: PlacementConfig, slots: int) -> Iterator[str]:
    """Yield reasons why the minimum number of workers is too small for reward models that need this number of slots."""
    min_workers = pools.workers.min_slots
    key = "pools.workers" if pools.workers.min is None else "pools.workers.min"
    if slots > min_workers:
        needed = format_count(slots, "worker slot")
        yield f"{key} is {min_workers}, but the reward models alone need {needed}. Raise {key}."
    if slots and slots == min_workers and not placement.can_take_turns:
        yield (
            f"{key} is {min_workers}, and the reward models need all {slots} slots, but placement.kind = "
            f"{placement.kind!r} needs more slots for rollout. Raise {key}, or set placement.kind to 'colocated' or "
            "'adaptive'."
        )


def find_timeout_conflicts(
    pools: PoolsConfig, scoring: ScoringConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig
) -> Iterator[str]:
    """Yield reasons why a request to an endpoint could take so long that its worker counts as stalled."""
    stall_seconds = pools.stall_seconds
    for key, endpoint in _iterate_endpoints(scoring, rollout, algorithm):
        if endpoint.timeout_seconds + MAX_PAUSE_SECONDS >= stall_seconds:
            yield (
                f"{key}.timeout_seconds is {endpoint.timeout_seconds:g}. Together with the longest pause between "
                f"attempts ({MAX_PAUSE_SECONDS:g} s), this reaches pools.stall_seconds ({stall_seconds:g} s), so a "
                "slow request would count as a stalled worker. Lower the first or raise the second."
            )


def _iterate_endpoints(
    scoring: ScoringConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig
) -> Iterator[tuple[str, Endpoint]]:
    """Yield the configuration key and the endpoint of every model that the run queries over HTTP."""
    for term, reward in scoring.model_rewards.items():
        if reward.endpoint is not None:
            yield f"reward {term!r}: model", reward.endpoint
    dialogue = None if rollout.environment is None else rollout.environment.dialogue
    if dialogue is not None and dialogue.model.endpoint is not None:
        yield "rollout.environment.model", dialogue.model.endpoint
    for key, teacher in algorithm.all_teachers.items():
        if teacher.endpoint is not None:
            yield key, teacher.endpoint
