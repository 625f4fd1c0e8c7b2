"""Prediction of the remaining time of a running stage, for each number of workers that could be moved now.

The prediction assumes that rollout workers start to score as soon as the rollout queue is empty, if they may still be
moved. Finished units tend to be short, so estimates from them alone would be too low. Therefore units in progress are
included, because each is known to take longer than its elapsed time.

A lane is one place in a worker's batch, which processes one work unit at a time. Shapes: K candidate numbers of workers
to move, B bootstrap resamples, F units in progress, W lanes, U units that are not started, P sampled units, S factors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rheostat.placement.forecast.lengths import sample_units, share_below
from rheostat.placement.forecast.stage import list_schedule, release_times, unit_seconds
from rheostat.placement.records import DrainInputs, Floats, RoleProgress

OVERDUE_SHARE = 0.25
"""Assumed remaining time of a unit that has already taken longer than all sampled units, as a fraction of its elapsed
time."""

FACTORS_S = np.geomspace(1 / 8, 8, 49)
"""Candidate values of the factor by which units of this stage take longer than units of earlier stages. A value below 1
means that units are shorter."""

FACTOR_SIGMA = 0.4
"""Standard deviation of the logarithm of the factor (`FACTORS_S`) in its prior, a log-normal distribution."""

MIN_SPREAD = 0.15
"""Minimum standard deviation that is assumed for the logarithm of a unit's time, because a small sample may
underestimate it."""


def sample_residuals(pool_BP: Floats, elapsed_F: Floats, *, seed: tuple[int, ...]) -> Floats:
    """Sample the remaining seconds of each unit in progress. The samples come from units that take longer than the
    unit's elapsed time.

    `pool_BP` contains the total seconds of sampled units, and `elapsed_F` the elapsed seconds of the units in progress.
    """
    rng = np.random.default_rng(seed)
    sorted_BP = np.sort(pool_BP, axis=1)
    uniform_BF = rng.random((pool_BP.shape[0], elapsed_F.size))
    size = pool_BP.shape[1]
    shorter_BF = np.stack([np.searchsorted(row, elapsed_F, side="right") for row in sorted_BP])
    rank_BF = np.minimum(shorter_BF + ((size - shorter_BF) * uniform_BF).astype(np.int64), size - 1)
    left_BF = np.take_along_axis(sorted_BP, rank_BF, axis=1) - elapsed_F
    return np.where(shorter_BF < size, left_BF, -OVERDUE_SHARE * np.log1p(-uniform_BF) * elapsed_F)


def estimate_stage_factor(pool_BP: Floats, elapsed_F: Floats, *, done: int, done_seconds: float) -> float:
    """Estimate the factor by which units of this stage take longer than the sampled units.

    Returns the posterior mean over `FACTORS_S`, with log-normal unit times. `done` units have finished and took
    `done_seconds` on average. Each unit in progress is a censored observation: its total time is only known to exceed
    its elapsed time. Without the units in progress, the estimate would be too low, because short units finish first.
    """
    logs = np.log(np.maximum(pool_BP, 1e-9))
    mean, sigma = float(logs.mean()), max(float(logs.std()), MIN_SPREAD)
    shift_S = np.log(FACTORS_S)
    belief_S = -(shift_S**2) / (2 * FACTOR_SIGMA**2)
    if done and done_seconds > 0:
        # The log of a log-normal's mean is sigma²/2 above the log of its median.
        gap_S = np.log(done_seconds) - sigma**2 / 2 - mean - shift_S
        belief_S = belief_S - done * gap_S**2 / (2 * sigma**2)
    if elapsed_F.size:
        outlived_FS = (np.log(np.maximum(elapsed_F, 1e-9))[:, None] - mean - shift_S) / sigma
        belief_S = belief_S + np.log(np.maximum(1 - share_below(outlived_FS), 1e-12)).sum(axis=0)
    weight_S = np.exp(belief_S - belief_S.max())
    return float((weight_S * FACTORS_S).sum() / weight_S.sum())


LANES = 32
"""Maximum number of workers that are simulated. A larger stage is replaced by a smaller stage with this number of
workers, the same number of units per worker and the same longest units."""

NEVER = 1e9
"""Number of seconds that represents "never". It is used as the end of work that has no worker."""

POOL = 256
"""Number of work units that are sampled from each bootstrap resample."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """Current state of a role, reduced to at most `LANES` workers."""

    free_BW: Floats
    """Seconds until each lane (place in a worker's batch) can take a unit, in ascending order. 0 for idle workers."""
    under_way_BF: Floats
    """Seconds until each unit in progress ends, including units on workers that will move to the other role."""
    seconds_BU: Floats
    """Seconds that each unit will take if it has not been started. Units that are ready come first, then units that
    become ready later."""
    waiting: int
    """Number of units that are ready but have not been started."""
    lanes_per_slot: float
    """Number of lanes (places for one unit at a time) in each slot."""


def predict_remaining(inputs: DrainInputs, moves: Sequence[int], *, bootstraps: int) -> Floats:
    """Return the predicted seconds to the end of the stage (K x B) for each candidate in `moves`.

    A candidate is a number of slots to move now. Positive numbers move slots to scoring, negative numbers to rollout.
    """
    scale = max(1.0, inputs.workers / LANES)
    states = _with_planned_workers(
        inputs,
        _state(inputs.rollout, inputs, scale, bootstraps, seed=(inputs.seed, 0)),
        _state(inputs.scoring, inputs, scale, bootstraps, seed=(inputs.seed, 1)),
        scale,
    )
    lanes = [_move_lanes(*states, move / scale, inputs.resize.mean_seconds) for move in moves]
    # Rollout workers that are moved now cannot be moved again later, and workers that came from scoring stay. If the
    # rollout queue is empty, the remaining rollout workers move to scoring now.
    spare = inputs.movable_rollout if inputs.rollout.waiting + inputs.rollout.coming else 0
    spare_K = [max(spare - max(move, 0), 0) / scale for move in moves]
    return _ends(
        *states,
        [free_BW for free_BW, _ in lanes],
        [free_BW for _, free_BW in lanes],
        spare_K=spare_K,
        cost=inputs.resize.mean_seconds,
    )


def _state(
    role: RoleProgress, inputs: DrainInputs, scale: float, bootstraps: int, *, seed: tuple[int, ...]
) -> RoleState:
    demand, started = role.demand, len(role.in_flight)
    remaining_slots = (started + role.waiting + role.coming) * demand.slots
    together = min(demand.units_at_once, max(1, -(-remaining_slots // max(role.slots, 1))))
    lanes = role.slots // demand.slots * together
    samples = sample_units(demand, POOL, bootstraps=bootstraps, seed=seed)
    pool_BP = unit_seconds(demand, samples.longest_BU, samples.tokens_BU, together=together)
    elapsed_F = np.array([unit.elapsed_seconds for unit in role.in_flight])
    done, done_seconds = _finished(role, inputs, lanes)
    pool_BP = pool_BP * estimate_stage_factor(pool_BP, elapsed_F, done=done, done_seconds=done_seconds)
    residual_BF = np.sort(sample_residuals(pool_BP, elapsed_F, seed=(*seed, 1)), axis=1)
    idle_BW = np.zeros((bootstraps, max(lanes - started, 0)))
    waiting, coming = round(role.waiting / scale), round(role.coming / scale)
    return RoleState(
        free_BW=_quantiles(np.concatenate([idle_BW, residual_BF], axis=1), scale),
        under_way_BF=_quantiles(residual_BF, scale),
        seconds_BU=pool_BP[:, np.arange(waiting + coming) % POOL],
        waiting=waiting,
        lanes_per_slot=together / demand.slots,
    )


def _finished(role: RoleProgress, inputs: DrainInputs, lanes: int) -> tuple[int, float]:
    """Return the number of finished units and their mean time in seconds, or (0, 0) if the time is unknown.

    The time is known only if no worker was moved or idle in this stage.
    """
    if not role.done or not role.waiting or role.coming or inputs.memory.moved:
        return 0, 0.0
    spent = lanes * inputs.elapsed_seconds - sum(unit.elapsed_seconds for unit in role.in_flight)
    return role.done, max(spent, 0.0) / role.done


def _quantiles(ascending_BW: Floats, scale: float) -> Floats:
    """Reduce the number of lanes by the factor `scale`. The remaining lanes are evenly spaced quantiles of the values.

    The longest value is always kept, because it determines the end of the stage.
    """
    size = ascending_BW.shape[1]
    count = max(1, round(size / scale)) if size else 0
    return ascending_BW[:, np.linspace(size - 1, 0, count).round().astype(np.int64)[::-1]] if count else ascending_BW


def _with_planned_workers(
    inputs: DrainInputs, rollout: RoleState, scoring: RoleState, scale: float
) -> tuple[RoleState, RoleState]:
    """Return the states of both roles as if every worker were already in its planned role.

    Workers that have not left their old role yet are moved, and workers that are still changing roles are added.
    """
    cost = inputs.resize.mean_seconds
    late = inputs.rollout.slots - inputs.plan.rollout, inputs.scoring.slots - inputs.plan.scoring
    for to_scoring, leaving in ((1, late[0]), (-1, late[1])):
        if leaving > 0:
            rollout_BW, scoring_BW = _move_lanes(rollout, scoring, to_scoring * leaving / scale, cost)
            rollout, scoring = replace(rollout, free_BW=rollout_BW), replace(scoring, free_BW=scoring_BW)
    travelling = -late[0] - max(late[1], 0), -late[1] - max(late[0], 0)
    return _add_arriving(rollout, travelling[0] / scale, cost), _add_arriving(scoring, travelling[1] / scale, cost)


def _add_arriving(role: RoleState, slots: float, cost: float) -> RoleState:
    lanes = max(round(slots * role.lanes_per_slot), 0)
    arriving_BW = np.full((role.free_BW.shape[0], lanes), cost)
    return replace(role, free_BW=np.sort(np.concatenate([role.free_BW, arriving_BW], axis=1), axis=1))


def _move_lanes(rollout: RoleState, scoring: RoleState, move: float, cost: float) -> tuple[Floats, Floats]:
    """Return the seconds until each rollout lane and each scoring lane is free, if `move` slots move to scoring.

    A negative `move` means that slots move to rollout. The lanes that become free first are moved.
    """
    source, target = (rollout, scoring) if move > 0 else (scoring, rollout)
    leaving = min(round(abs(move) * source.lanes_per_slot), source.free_BW.shape[1])
    arriving = round(abs(move) * target.lanes_per_slot) if leaving else 0
    gone_BW = source.free_BW[:, np.arange(arriving) * leaving // max(arriving, 1)]
    left_BW = source.free_BW[:, leaving:]
    joined_BW = np.sort(np.concatenate([target.free_BW, gone_BW + cost], axis=1), axis=1)
    return (left_BW, joined_BW) if move > 0 else (joined_BW, left_BW)


def _ends(
    rollout: RoleState,
    scoring: RoleState,
    rollout_K: list[Floats],
    scoring_K: list[Floats],
    *,
    spare_K: list[float],
    cost: float,
) -> Floats:
    K, B = len(rollout_K), rollout.free_BW.shape[0]
    done_XU, free_XW = list_schedule(_padded(rollout_K), np.tile(rollout.seconds_BU, (K, 1)))
    done_XU = np.sort(np.concatenate([done_XU, np.tile(rollout.under_way_BF, (K, 1))], axis=1), axis=1)
    coming = scoring.seconds_BU.shape[1] - scoring.waiting
    ready_XU = np.concatenate([np.zeros((K * B, scoring.waiting)), release_times(done_XU, coming)], axis=1)
    lanes_K1 = np.repeat([round(spare * rollout.lanes_per_slot) for spare in spare_K], B)[:, None]
    joining_XW = np.where(np.arange(free_XW.shape[1]) < lanes_K1, np.sort(free_XW, axis=1) + cost, NEVER)
    stride = max(1, round(rollout.lanes_per_slot / scoring.lanes_per_slot))
    free_XW = np.concatenate([_padded(scoring_K), joining_XW[:, stride - 1 :: stride]], axis=1)
    scored_XU, _ = list_schedule(free_XW, np.tile(scoring.seconds_BU, (K, 1)), ready_XU=ready_XU)
    under_way_B = scoring.under_way_BF.max(axis=1, initial=0)
    last_X = np.maximum(done_XU.max(axis=1, initial=0), scored_XU.max(axis=1, initial=0))
    return np.asarray(np.maximum(last_X.reshape(K, B), under_way_B))


def _padded(free_K: list[Floats]) -> Floats:
    """Combine the lanes of all candidates in one array. Candidates with fewer lanes get additional lanes that are never
    free."""
    width = max(1, max(free_BW.shape[1] for free_BW in free_K))
    padded = [np.pad(free, ((0, 0), (0, width - free.shape[1])), constant_values=NEVER) for free in free_K]
    return np.concatenate(padded)
