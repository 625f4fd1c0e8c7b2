"""Coefficients of KL penalties: fixed, or adapted to what the iteration before measured, so that they follow from the
store alone."""

from collections.abc import Mapping

from models.algorithms.advantages import reward_kl
from models.config.objectives import AdaptiveKl, KlPenalty
from models.objectives.kl_control import next_coefficient
from tasks.plan import credit_key, policy_key
from tasks.session import RunRef, session_of
from tasks.stages import required


def reward_coefficient(run: RunRef, number: int) -> float:
    """Coefficient of an iteration's penalty in the reward; 0 without one."""
    kl = reward_kl(session_of(run).settings.algorithm)
    if kl is None:
        return 0.0
    return _coefficient(run, number, first=kl.coefficient, adaptive=kl.adaptive, measured=credit_key(number - 1))


def loss_coefficient(run: RunRef, number: int) -> float:
    """Coefficient of an iteration's penalty in the loss; 0 without one."""
    kl = session_of(run).settings.update.kl
    if not isinstance(kl, KlPenalty):
        return 0.0
    return _coefficient(run, number, first=kl.coefficient, adaptive=kl.adaptive, measured=policy_key(number - 1))


def _coefficient(run: RunRef, number: int, *, first: float, adaptive: AdaptiveKl | None, measured: str) -> float:
    if number == 1 or adaptive is None:
        return first
    discarded = required(run, policy_key(number - 1)).metrics["quarantined"] > 0
    return adapted(required(run, measured).metrics, adaptive=adaptive, discarded=discarded)


def adapted(measured: Mapping[str, float], *, adaptive: AdaptiveKl, discarded: bool) -> float:
    """Coefficient after an iteration; it stays where nothing was learnt or no divergence was measured."""
    coefficient = measured["kl_coefficient"]
    if discarded or "kl" not in measured:
        return coefficient
    completions = int(measured.get("completions", measured["samples"]))
    return next_coefficient(coefficient, kl=measured["kl"], completions=completions, adaptive=adaptive)
