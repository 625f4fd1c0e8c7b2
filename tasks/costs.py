"""Costs of iterations and evaluations by role, and the end of a run that exceeds its budget."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from rheostat.infra.costs import Cost, total
from rheostat.infra.errors import BudgetSpent
from rheostat.infra.store.manifests import Manifest
from rheostat.tasks.auxiliary import auxiliary_manifests
from rheostat.tasks.events import emit_of_run
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import reward_model_role
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.views.metrics import run_costs, sealed_iterations


@dataclass(frozen=True, slots=True)
class Reservation:
    """Number of worker slots that this process has reserved, and for how long. Reserved slots cost money even if
    they are idle."""

    seconds: float = 0.0
    slots: int = 0


async def read_reservation(open_run: OpenRun) -> Reservation:
    """Return the number of worker slots that this process has reserved, and the seconds since the last call (or since
    the run was opened)."""
    return Reservation(open_run.account.seconds_since_last_call(), (await open_run.get_fleet()).slots)


def check_budget(open_run: OpenRun) -> None:
    """Raise BudgetSpent if the completed iterations have used up the budget although more iterations are configured.
    Otherwise initialize the total costs of this process from these iterations."""
    done = len(sealed_iterations(open_run.run))
    open_run.account.spent = total(run_costs(open_run.run).values())
    reached = open_run.settings.budget.find_spent_limit(open_run.account.spent)
    if reached is not None and done < open_run.settings.iterations:
        name, text = open_run.run.name, f"{reached} after iteration {done} of {open_run.settings.iterations}"
        emit_of_run(name, "budget.spent", told=text)
        raise BudgetSpent(
            f"Run {name!r} has reached a limit of its budget after iteration {done} of "
            f"{open_run.settings.iterations}: {reached}. To continue, run the same command with a larger limit."
        )


async def record_costs(open_run: OpenRun, number: int) -> bool:
    """Compute the costs of an iteration, which its last record (seal) will contain. Return whether the run must end
    after the iteration because of the budget."""
    iteration, settings = Iteration(open_run.run, number), open_run.settings
    costs = iteration_costs(open_run, iteration, await read_reservation(open_run))
    open_run.account.unsealed[number] = costs
    open_run.account.add(costs)
    return number < settings.iterations and settings.budget.find_spent_limit(open_run.account.spent) is not None


def iteration_costs(open_run: OpenRun, iteration: Iteration, reservation: Reservation) -> dict[str, Cost]:
    """Return the costs of an iteration, by role ("rollout", "scoring", "update"). Call this after the update."""
    trained = [*auxiliary_manifests(open_run, iteration), iteration.update]
    known_bundles = {bundle.key for bundle in iteration.policy.bundles.values()}
    return compute_costs(
        open_run, iteration.batches, reservation, credit=[iteration.credit], trained=trained, known=known_bundles
    )


def compute_costs(
    open_run: OpenRun,
    batches: Sequence[Batch],
    reservation: Reservation,
    *,
    credit: Sequence[Manifest] = (),
    trained: Sequence[Manifest] = (),
    known: Set[str] = frozenset(),
) -> dict[str, Cost]:
    """Return the costs of evaluating or training on some batches, by role: "rollout", "scoring" and "update".
    `credit` and `trained` are the results of the later stages. Stored files in `known` existed before and are not
    counted as new data.

    A worker counts as reserved while this process holds it. If its recorded working time is longer, the working time
    counts, which includes the work of an earlier process that was killed. The time of slots shared by rollout and
    reward models is divided in proportion to their work.
    """
    pools, prices = open_run.settings.pools, open_run.settings.budget.prices
    rollout, update = (
        _generation_cost(_manifests_of(batches, "rollout")),
        _update_cost(trained, ranks=pools.update_ranks, known=known),
    )
    hosted, elsewhere = _judge_costs(open_run, batches)
    served = total(hosted)
    other_scoring = total([_working_cost([*_manifests_of(batches, "scoring"), *credit]), *elsewhere])
    busy_seconds = rollout.busy_seconds + served.busy_seconds
    share = rollout.busy_seconds / busy_seconds if busy_seconds else 1.0
    slots, others = (
        reservation.seconds * reservation.slots,
        reservation.seconds * pools.scoring_workers * (1 + len(elsewhere)),
    )
    costs = {
        "rollout": _with_reserved_time(rollout, slots * share, gpus=pools.gpus_per_worker),
        "scoring": total(
            [
                _with_reserved_time(served, slots * (1 - share), gpus=pools.gpus_per_worker),
                _with_reserved_time(other_scoring, others),
            ]
        ),
        "update": _with_reserved_time(
            update, reservation.seconds * pools.update_ranks, gpus=pools.gpus_per_update_rank
        ),
    }
    return {
        role: cost.model_copy(update={"price": cost.price + prices.price_workers(cost)}) for role, cost in costs.items()
    }


def _manifests_of(batches: Sequence[Batch], stage: str) -> list[Manifest]:
    """Return the stored results of a stage that the run itself computed. Results that a fork shares cost nothing."""
    found = [(batch.run, manifest) for batch in batches for manifest in batch.stage_manifests(stage)]
    return [manifest for run, manifest in found if not run.inherits(manifest.key)]


def _generation_cost(rollouts: Sequence[Manifest]) -> Cost:
    tokens = {
        "prompt_tokens": _sum_metric(rollouts, "prompt_tokens"),
        "written_tokens": _sum_metric(rollouts, "tokens"),
    }
    return _working_cost(rollouts).model_copy(update=tokens)


def _update_cost(trained: Sequence[Manifest], *, ranks: int, known: Set[str]) -> Cost:
    versions = [manifest for manifest in trained if manifest.bundles]
    return _working_cost(trained, workers=ranks, known=known).model_copy(
        update={"learnt_tokens": _sum_metric(versions, "tokens")}
    )


def _judge_costs(open_run: OpenRun, batches: Sequence[Batch]) -> tuple[list[Cost], list[Cost]]:
    """Return the costs of judges and reward models, one for each reward: first for models in worker slots, then for
    models at endpoints."""
    hosted: list[Cost] = []
    elsewhere: list[Cost] = []
    prices = open_run.settings.budget.prices.judges
    for term, reward in open_run.settings.scoring.model_rewards.items():
        verdicts, is_hosted = _manifests_of(batches, reward_model_role(term)), reward.endpoint is None
        read_tokens = sum(manifest.provenance.seconds.get("read_tokens", 0.0) for manifest in verdicts)
        usage = {
            "prompt_tokens": _sum_metric(verdicts, "tokens_read") + int(read_tokens),
            "written_tokens": _sum_metric(verdicts, "tokens") if reward.generates_text or not is_hosted else 0,
            "judge_calls": _sum_metric(verdicts, "sequences"),
        }
        cost = _working_cost(verdicts, workers=reward.slots if is_hosted else 1).model_copy(update=usage)
        price = prices[term].price_answers(cost) if term in prices else 0.0
        (hosted if is_hosted else elsewhere).append(cost.model_copy(update={"price": price}))
    return hosted, elsewhere


def _working_cost(manifests: Sequence[Manifest], *, workers: int = 1, known: Set[str] = frozenset()) -> Cost:
    """Return the seconds that workers needed to produce these results, and the bytes of new data. Each result
    occupied `workers` workers."""
    shards = [shard.bytes for manifest in manifests for shard in manifest.shards]
    bundles = [bundle for manifest in manifests for bundle in manifest.bundles.values() if bundle.key not in known]
    return Cost(
        busy_seconds=workers * sum(manifest.provenance.seconds["worker"] for manifest in manifests),
        bytes=sum(shards) + sum(bundle.bytes for bundle in bundles),
    )


def _with_reserved_time(cost: Cost, seconds: float, *, gpus: float = 0.0) -> Cost:
    seconds = max(seconds, cost.busy_seconds)
    return cost.model_copy(update={"worker_seconds": seconds, "gpu_seconds": gpus * seconds})


def _sum_metric(manifests: Sequence[Manifest], metric: str) -> int:
    return int(sum(manifest.metrics.get(metric, 0.0) for manifest in manifests))
