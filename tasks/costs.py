"""Costs of iterations and evaluations by role, and the end of a run that exceeds its budget."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from infra.costs import Cost, total
from infra.errors import BudgetSpent
from infra.store.manifests import Manifest
from tasks.auxiliary import auxiliary_of
from tasks.events import emit_of_run
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.keys import reward_model_role
from tasks.run.session import Session
from tasks.views.metrics import run_costs, sealed_iterations


@dataclass(frozen=True, slots=True)
class Held:
    """Number of reserved worker slots and the duration of the reservation."""

    seconds: float = 0.0
    slots: int = 0


async def held_since(session: Session) -> Held:
    """Return the reserved worker slots of this process, and the seconds since the last call or since the run was
    opened."""
    return Held(session.account.lap(), (await session.fleet()).slots)


def check_budget(session: Session) -> None:
    """Raise BudgetSpent if the sealed iterations have reached a limit of the budget and iterations remain. Starts the
    account from these costs."""
    done = len(sealed_iterations(session.run))
    session.account.spent = total(run_costs(session.run).values())
    reached = session.settings.budget.reached(session.account.spent)
    if reached is not None and done < session.settings.iterations:
        name, told = session.run.name, f"{reached} after iteration {done} of {session.settings.iterations}"
        emit_of_run(name, "budget.spent", told=told)
        raise BudgetSpent(f"run {name!r}: {told}; the same command with a larger limit goes on from there")


async def account(session: Session, number: int) -> bool:
    """Compute the costs of an iteration for its seal. Return whether the run must end after it because of the
    budget."""
    iteration, settings = Iteration(session.run, number), session.settings
    costs = iteration_costs(session, iteration, await held_since(session))
    session.account.unsealed[number] = costs
    session.account.take(costs)
    return number < settings.iterations and settings.budget.reached(session.account.spent) is not None


def iteration_costs(session: Session, iteration: Iteration, held: Held) -> dict[str, Cost]:
    """Return the costs of an iteration after its update, by role."""
    learnt = [*auxiliary_of(session, iteration), iteration.update]
    known = {bundle.key for bundle in iteration.policy.bundles.values()}
    return costs_of(session, iteration.batches, held, credit=[iteration.credit], learnt=learnt, known=known)


def costs_of(
    session: Session,
    batches: Sequence[Batch],
    held: Held,
    *,
    credit: Sequence[Manifest] = (),
    learnt: Sequence[Manifest] = (),
    known: Set[str] = frozenset(),
) -> dict[str, Cost]:
    """Return the costs of some batches and of the stages that followed, by role. Bundles in `known` existed before.

    A worker counts as reserved while this process has it, and at least for its working time, so that work which an
    earlier process committed before it was killed is included. The time of slots shared by rollout and reward models is
    divided in proportion to their work.
    """
    pools, prices = session.settings.pools, session.settings.budget.prices
    rollout, update = _generation(_stage(batches, "rollout")), _update(learnt, ranks=pools.update_ranks, known=known)
    hosted, elsewhere = _judges(session, batches)
    served = total(hosted)
    beside = total([_made([*_stage(batches, "scoring"), *credit]), *elsewhere])
    at_work = rollout.busy_seconds + served.busy_seconds
    share = rollout.busy_seconds / at_work if at_work else 1.0
    slots, others = held.seconds * held.slots, held.seconds * pools.scoring_workers * (1 + len(elsewhere))
    costs = {
        "rollout": _held(rollout, slots * share, gpus=pools.gpus_per_worker),
        "scoring": total([_held(served, slots * (1 - share), gpus=pools.gpus_per_worker), _held(beside, others)]),
        "update": _held(update, held.seconds * pools.update_ranks, gpus=pools.gpus_per_update_rank),
    }
    return {
        role: cost.model_copy(update={"price": cost.price + prices.of_workers(cost)}) for role, cost in costs.items()
    }


def _stage(batches: Sequence[Batch], stage: str) -> list[Manifest]:
    return [manifest for batch in batches for manifest in batch.stage(stage)]


def _generation(rollouts: Sequence[Manifest]) -> Cost:
    tokens = {"prompt_tokens": _sum(rollouts, "prompt_tokens"), "written_tokens": _sum(rollouts, "tokens")}
    return _made(rollouts).model_copy(update=tokens)


def _update(learnt: Sequence[Manifest], *, ranks: int, known: Set[str]) -> Cost:
    versions = [manifest for manifest in learnt if manifest.bundles]
    return _made(learnt, workers=ranks, known=known).model_copy(update={"learnt_tokens": _sum(versions, "tokens")})


def _judges(session: Session, batches: Sequence[Batch]) -> tuple[list[Cost], list[Cost]]:
    """Return the costs of judging per reward, for models in worker slots and for models elsewhere."""
    hosted: list[Cost] = []
    elsewhere: list[Cost] = []
    prices = session.settings.budget.prices.judges
    for term, reward in session.settings.scoring.model_rewards.items():
        verdicts, is_hosted = _stage(batches, reward_model_role(term)), reward.endpoint is None
        read = sum(manifest.provenance.seconds.get("read_tokens", 0.0) for manifest in verdicts)
        asked = {
            "prompt_tokens": _sum(verdicts, "tokens_read") + int(read),
            "written_tokens": _sum(verdicts, "tokens") if reward.writes or not is_hosted else 0,
            "judge_calls": _sum(verdicts, "sequences"),
        }
        cost = _made(verdicts, workers=reward.slots if is_hosted else 1).model_copy(update=asked)
        price = prices[term].of(cost) if term in prices else 0.0
        (hosted if is_hosted else elsewhere).append(cost.model_copy(update={"price": price}))
    return hosted, elsewhere


def _made(manifests: Sequence[Manifest], *, workers: int = 1, known: Set[str] = frozenset()) -> Cost:
    """Return the working time that some manifests took, with `workers` workers each, and the bytes of their new
    data."""
    shards = [shard.bytes for manifest in manifests for shard in manifest.shards]
    bundles = [bundle for manifest in manifests for bundle in manifest.bundles.values() if bundle.key not in known]
    return Cost(
        busy_seconds=workers * sum(manifest.provenance.seconds["worker"] for manifest in manifests),
        bytes=sum(shards) + sum(bundle.bytes for bundle in bundles),
    )


def _held(cost: Cost, seconds: float, *, gpus: float = 0.0) -> Cost:
    seconds = max(seconds, cost.busy_seconds)
    return cost.model_copy(update={"worker_seconds": seconds, "gpu_seconds": gpus * seconds})


def _sum(manifests: Sequence[Manifest], metric: str) -> int:
    return int(sum(manifest.metrics.get(metric, 0.0) for manifest in manifests))
