"""How long a stage still takes, from where its roles stand, for each number of workers that may be moved.

Workers of rollout that may still move score as soon as their queue is empty, as was planned. Units that have finished
are the short ones; those still under way are known to be longer than they have taken so far.

Shapes: K candidates, B bootstraps, F units in flight, W lanes (places for a unit), U units not begun, P drawn units, S
factors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.forecast.lengths import draw_units, share_below
from placement.forecast.stage import list_schedule, releases, unit_seconds
from placement.records import DrainInputs, Floats, RoleProgress

BEYOND = 0.25
"""A unit that has outlasted all that was drawn takes this share of its time again, on average."""

FACTORS_S = np.geomspace(1 / 8, 8, 49)
"""By how much a stage's units may differ from the last ones."""

FACTOR_SIGMA = 0.4
"""Of the log-normal belief in these factors before the stage began."""

LEAST_SPREAD = 0.15
"""Units differ at least so much, in log space, whatever a small sample says."""


def residuals(pool_BP: Floats, elapsed_F: Floats, *, seed: tuple[int, ...]) -> Floats:
    """Draw T - e from the units T of the pool that last longer than e, for each unit under way since e seconds."""
    rng = np.random.default_rng(seed)
    sorted_BP = np.sort(pool_BP, axis=1)
    uniform_BF = rng.random((pool_BP.shape[0], elapsed_F.size))
    size = pool_BP.shape[1]
    shorter_BF = np.stack([np.searchsorted(row, elapsed_F, side="right") for row in sorted_BP])
    rank_BF = np.minimum(shorter_BF + ((size - shorter_BF) * uniform_BF).astype(np.int64), size - 1)
    left_BF = np.take_along_axis(sorted_BP, rank_BF, axis=1) - elapsed_F
    return np.where(shorter_BF < size, left_BF, -BEYOND * np.log1p(-uniform_BF) * elapsed_F)


def stage_factor(pool_BP: Floats, elapsed_F: Floats, *, done: int, done_seconds: float) -> float:
    """Return by how much longer than drawn this stage's units are, from those done and those still under way.

    The posterior mean over `FACTORS_S`: units are log-normal; those done took `done_seconds` each on average, and each
    one under way lasts longer than it has so far (censored observations, so that early finishers do not bias it).
    """
    logs = np.log(np.maximum(pool_BP, 1e-9))
    mean, sigma = float(logs.mean()), max(float(logs.std()), LEAST_SPREAD)
    shift_S = np.log(FACTORS_S)
    belief_S = -(shift_S**2) / (2 * FACTOR_SIGMA**2)
    if done and done_seconds > 0:
        # The mean of a log-normal lies sigma²/2 above its median.
        gap_S = np.log(done_seconds) - sigma**2 / 2 - mean - shift_S
        belief_S = belief_S - done * gap_S**2 / (2 * sigma**2)
    if elapsed_F.size:
        outlived_FS = (np.log(np.maximum(elapsed_F, 1e-9))[:, None] - mean - shift_S) / sigma
        belief_S = belief_S + np.log(np.maximum(1 - share_below(outlived_FS), 1e-12)).sum(axis=0)
    weight_S = np.exp(belief_S - belief_S.max())
    return float((weight_S * FACTORS_S).sum() / weight_S.sum())


LANES = 32
"""Beyond so many workers a stage is predicted at a smaller scale: with as many units per worker, and the same tail."""

NEVER = 1e9
"""Seconds until work is done for which no worker is left."""

POOL = 256
"""Units drawn per bootstrap."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role as it stands, at the scale of the prediction."""

    free_BW: Floats
    """Seconds until each of its lanes is free, ascending: 0 for idle workers."""
    under_way_BF: Floats
    """Seconds until each unit under way ends, on a worker that stays or leaves."""
    seconds_BU: Floats
    """Seconds of the units that are not begun: those that wait, then those that come."""
    waiting: int
    lanes_per_slot: float


def remaining(inputs: DrainInputs, moves: Sequence[int], *, bootstraps: int) -> Floats:
    """Return seconds [K, B] to the end of the stage if so many slots go to scoring (to rollout where negative)."""
    scale = max(1.0, inputs.workers / LANES)
    states = _settled(
        inputs,
        _state(inputs.rollout, inputs, scale, bootstraps, seed=(inputs.seed, 0)),
        _state(inputs.scoring, inputs, scale, bootstraps, seed=(inputs.seed, 1)),
        scale,
    )
    dealt = [_dealt(*states, move / scale, inputs.resize.mean_seconds) for move in moves]
    # Who is moved now cannot be handed over later, and who came from scoring stays. Once the queue is empty it is now.
    spare = inputs.movable_rollout if inputs.rollout.waiting + inputs.rollout.coming else 0
    spare_K = [max(spare - max(move, 0), 0) / scale for move in moves]
    return _ends(
        *states,
        [free_BW for free_BW, _ in dealt],
        [free_BW for _, free_BW in dealt],
        spare_K=spare_K,
        cost=inputs.resize.mean_seconds,
    )


def _state(
    role: RoleProgress, inputs: DrainInputs, scale: float, bootstraps: int, *, seed: tuple[int, ...]
) -> RoleState:
    demand, begun = role.demand, len(role.in_flight)
    left = (begun + role.waiting + role.coming) * demand.slots
    together = min(demand.units_at_once, max(1, -(-left // max(role.slots, 1))))
    lanes = role.slots // demand.slots * together
    drawn = draw_units(demand, POOL, bootstraps=bootstraps, seed=seed)
    pool_BP = unit_seconds(demand, drawn.longest_BU, drawn.tokens_BU, together=together)
    elapsed_F = np.array([unit.elapsed_seconds for unit in role.in_flight])
    done, done_seconds = _finished(role, inputs, lanes)
    pool_BP = pool_BP * stage_factor(pool_BP, elapsed_F, done=done, done_seconds=done_seconds)
    residual_BF = np.sort(residuals(pool_BP, elapsed_F, seed=(*seed, 1)), axis=1)
    idle_BW = np.zeros((bootstraps, max(lanes - begun, 0)))
    waiting, coming = round(role.waiting / scale), round(role.coming / scale)
    return RoleState(
        free_BW=_scaled(np.concatenate([idle_BW, residual_BF], axis=1), scale),
        under_way_BF=_scaled(residual_BF, scale),
        seconds_BU=pool_BP[:, np.arange(waiting + coming) % POOL],
        waiting=waiting,
        lanes_per_slot=together / demand.slots,
    )


def _finished(role: RoleProgress, inputs: DrainInputs, lanes: int) -> tuple[int, float]:
    """How many units are done and how long each took, where that can be told: nobody was moved, nobody was idle."""
    if not role.done or not role.waiting or role.coming or inputs.memory.moved:
        return 0, 0.0
    spent = lanes * inputs.elapsed_seconds - sum(unit.elapsed_seconds for unit in role.in_flight)
    return role.done, max(spent, 0.0) / role.done


def _scaled(ascending_BW: Floats, scale: float) -> Floats:
    """As many quantiles as the scale leaves, the longest kept: it is the tail."""
    size = ascending_BW.shape[1]
    kept = max(1, round(size / scale)) if size else 0
    return ascending_BW[:, np.linspace(size - 1, 0, kept).round().astype(np.int64)[::-1]] if kept else ascending_BW


def _settled(inputs: DrainInputs, rollout: RoleState, scoring: RoleState, scale: float) -> tuple[RoleState, RoleState]:
    """Count workers where the plan has dealt them: some have yet to leave, some are still on their way."""
    cost = inputs.resize.mean_seconds
    late = inputs.rollout.slots - inputs.plan.rollout, inputs.scoring.slots - inputs.plan.scoring
    for to_scoring, leaving in ((1, late[0]), (-1, late[1])):
        if leaving > 0:
            rollout_BW, scoring_BW = _dealt(rollout, scoring, to_scoring * leaving / scale, cost)
            rollout, scoring = replace(rollout, free_BW=rollout_BW), replace(scoring, free_BW=scoring_BW)
    travelling = -late[0] - max(late[1], 0), -late[1] - max(late[0], 0)
    return _awaited(rollout, travelling[0] / scale, cost), _awaited(scoring, travelling[1] / scale, cost)


def _awaited(role: RoleState, slots: float, cost: float) -> RoleState:
    lanes = max(round(slots * role.lanes_per_slot), 0)
    arriving_BW = np.full((role.free_BW.shape[0], lanes), cost)
    return replace(role, free_BW=np.sort(np.concatenate([role.free_BW, arriving_BW], axis=1), axis=1))


def _dealt(rollout: RoleState, scoring: RoleState, move: float, cost: float) -> tuple[Floats, Floats]:
    """When the lanes of rollout and of scoring are free after a move of slots: those that are free first go."""
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
    ready_XU = np.concatenate([np.zeros((K * B, scoring.waiting)), releases(done_XU, coming)], axis=1)
    lanes_K1 = np.repeat([round(spare * rollout.lanes_per_slot) for spare in spare_K], B)[:, None]
    joining_XW = np.where(np.arange(free_XW.shape[1]) < lanes_K1, np.sort(free_XW, axis=1) + cost, NEVER)
    stride = max(1, round(rollout.lanes_per_slot / scoring.lanes_per_slot))
    free_XW = np.concatenate([_padded(scoring_K), joining_XW[:, stride - 1 :: stride]], axis=1)
    scored_XU, _ = list_schedule(free_XW, np.tile(scoring.seconds_BU, (K, 1)), ready_XU=ready_XU)
    under_way_B = scoring.under_way_BF.max(axis=1, initial=0)
    last_X = np.maximum(done_XU.max(axis=1, initial=0), scored_XU.max(axis=1, initial=0))
    return np.asarray(np.maximum(last_X.reshape(K, B), under_way_B))


def _padded(free_K: list[Floats]) -> Floats:
    """Lanes of all candidates below one another, filled up with lanes that are never free."""
    most = max(1, max(free_BW.shape[1] for free_BW in free_K))
    padded = [np.pad(free, ((0, 0), (0, most - free.shape[1])), constant_values=NEVER) for free in free_K]
    return np.concatenate(padded)
