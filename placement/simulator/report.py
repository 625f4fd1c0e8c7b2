"""What the adaptive policy shall reach, cell by cell, as ratios over paired seeds with Student intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from infra.statistics import student_quantile
from placement.simulator.cells import CellResult


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]" if self.seeds > 1 else f"{self.mean:.3f}"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Mean over seeds of over / under; both met the same random numbers, so their difficulty cancels."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def interval(values: Sequence[float]) -> Ratio:
    """Mean and 95% interval of Student; of one value alone nothing is known: infinite."""
    mean = fmean(values)
    half = float("inf")
    if len(values) > 1:
        half = student_quantile(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    return Ratio(mean=mean, low=mean - half, high=mean + half, seeds=len(values))


LARGE = 4096
"""Workers at which decisions are timed."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on a measured ratio."""

    name: str
    bound: float
    side: Literal["at least", "at most"]
    measure: Callable[[CellResult], Ratio]
    needs: tuple[str, ...] = ("adaptive",)
    """Policies without whose results it cannot be measured."""
    speaks_of: Callable[[CellResult], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class AimResult:
    """One aim in one cell."""

    aim: Aim
    result: CellResult
    ratio: Ratio

    @property
    def holds(self) -> bool:
        """Whether the mean keeps the bound."""
        mean, bound = self.ratio.mean, self.aim.bound
        return mean >= bound if self.aim.side == "at least" else mean <= bound


def _time(name: str, bound: float, side: Literal["at least", "at most"], over: str, under: str) -> Aim:
    return Aim(
        name,
        bound,
        side,
        measure=lambda result: paired_ratio(result.seconds[over], result.seconds[under]),
        needs=(over, under),
    )


def _moves(result: CellResult) -> bool:
    return result.cell.scenario in ("drift", "burst") and result.tail < 1


def _best_split(result: CellResult) -> Ratio:
    return paired_ratio(result.seconds["fixed_hindsight"], result.seconds["adaptive"])


AIMS = (
    _time("fixed_hindsight / adaptive", 0.97, "at least", "fixed_hindsight", "adaptive"),
    Aim(
        "the same, drift and burst, throughput-bound",
        1.2,
        "at least",
        measure=_best_split,
        needs=("fixed_hindsight", "adaptive"),
        speaks_of=_moves,
    ),
    _time("colocated / adaptive", 0.98, "at least", "colocated", "adaptive"),
    _time("adaptive / clairvoyant", 1.15, "at most", "adaptive", "clairvoyant"),
    Aim(
        "moves per worker and iteration, handovers apart", 0.3, "at most", measure=lambda result: interval(result.moves)
    ),
    Aim(
        f"slowest decision at N = {LARGE}, s",
        0.050,
        "at most",
        measure=lambda result: interval([result.slowest_decision]),
        speaks_of=lambda result: result.cell.workers >= LARGE,
    ),
)
"""All aims."""


def verdicts(results: Sequence[CellResult]) -> list[AimResult]:
    """Every aim in every cell that it speaks of and whose policies were run."""
    return [
        AimResult(aim=aim, result=result, ratio=aim.measure(result))
        for aim in AIMS
        for result in results
        if set(aim.needs) <= set(result.seconds) and aim.speaks_of(result)
    ]
