"""How a workload moves from one iteration to the next: factors of the median length of rollouts and of verdicts."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RANGE = 8.0  # from the smallest to the largest factor of every scenario that moves
PERIOD = 8  # iterations of one wave of the sinusoid, and between two flips
BURST_SHARE = 0.25  # iterations that burst


def _stationary(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    return np.ones(iterations), np.ones(iterations)


def _drift(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    return RANGE ** np.linspace(-0.5, 0.5, iterations), np.ones(iterations)


def _step(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    late = np.arange(iterations) >= iterations / 2
    return np.where(late, RANGE**0.5, RANGE**-0.5), np.ones(iterations)


def _sinusoid(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    return RANGE ** (0.5 * np.sin(2 * np.pi * np.arange(iterations) / PERIOD)), np.ones(iterations)


def _flip(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    late = np.arange(iterations) // (PERIOD // 2) % 2 == 1
    return np.where(late, RANGE**0.25, RANGE**-0.25), np.where(late, RANGE**-0.25, RANGE**0.25)


def _burst(iterations: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    bursts = np.zeros(iterations, bool)
    bursts[rng.choice(iterations, max(1, round(BURST_SHARE * iterations)), replace=False)] = True
    return np.where(bursts, RANGE, 1.0), np.ones(iterations)


SCENARIOS: dict[str, Callable[[int, np.random.Generator], tuple[Floats, Floats]]] = {
    "stationary": _stationary,
    "drift": _drift,
    "step": _step,
    "sinusoid": _sinusoid,
    "flip": _flip,
    "burst": _burst,
}
"""By name; each gives the factors of all iterations, of rollouts and of verdicts."""
