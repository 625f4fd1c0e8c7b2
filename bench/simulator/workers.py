"""Decoding times of simulated workers. A worker decodes either one unit after another or several units in a shared
batch."""

from bisect import insort
from dataclasses import dataclass, field
from typing import Protocol

from bench.simulator.workload import RoleWork


@dataclass(slots=True)
class DecodeSteps:
    """Sums over decoding steps, in the form in which inference engines report them.

    From these sums, step time is fitted as a line over the batch size.
    """

    steps: float = 0.0
    """Number of steps."""
    sequences: float = 0.0
    """Sum of the batch sizes."""
    sequences_squared: float = 0.0
    """Sum of the squared batch sizes."""
    seconds: float = 0.0
    """Sum of the times of all steps, in seconds."""
    sequence_seconds: float = 0.0
    """Sum of step time (seconds) × batch size."""

    def add(self, steps: float, *, batch: int, step_seconds: float) -> None:
        """Add `steps` decoding steps with the same batch size."""
        self.steps += steps
        self.sequences += steps * batch
        self.sequences_squared += steps * batch * batch
        self.seconds += steps * step_seconds
        self.sequence_seconds += steps * step_seconds * batch

    def since(self, earlier: "DecodeSteps") -> "DecodeSteps":
        """Return the sums over the steps after an earlier copy of this record was made."""
        return DecodeSteps(
            steps=self.steps - earlier.steps,
            sequences=self.sequences - earlier.sequences,
            sequences_squared=self.sequences_squared - earlier.sequences_squared,
            seconds=self.seconds - earlier.seconds,
            sequence_seconds=self.sequence_seconds - earlier.sequence_seconds,
        )

    def copy(self) -> "DecodeSteps":
        """Return a copy of the current sums."""
        return DecodeSteps(self.steps, self.sequences, self.sequences_squared, self.seconds, self.sequence_seconds)


class Decoder(Protocol):
    """Simulated worker with units in progress. Implemented by `WholeUnits` and `SharedBatch`, and called by `Stage`."""

    def begin(self, unit: int, now: float) -> None:
        """Start a unit at the time `now`."""

    def next_end(self) -> tuple[float, int]:
        """Return the time at which the next unit ends, and the index of the unit, assuming that no other unit is
        started before."""

    def end(self, unit: int, now: float) -> DecodeSteps:
        """Remove a unit that has ended, and return the sums over its decoding steps."""

    def drop(self, unit: int) -> None:
        """Remove a unit without a result, because its worker died."""


@dataclass(slots=True)
class WholeUnits:
    """Simulated worker that processes one unit at a time. The sequences of the unit are decoded as one batch until the
    longest sequence ends."""

    work: RoleWork
    """Lengths and times of the units that the worker can process."""
    slowness: float
    """Factor by which all times of this worker are multiplied."""
    _unit: int = -1
    _end: float = 0.0

    def begin(self, unit: int, now: float) -> None:
        self._unit, self._end = unit, now + self.slowness * float(self.work.seconds_U[unit])

    def next_end(self) -> tuple[float, int]:
        return self._end, self._unit

    def end(self, unit: int, now: float) -> DecodeSteps:
        return unit_steps(self.work, unit, slowness=self.slowness)

    def drop(self, unit: int) -> None:
        self._unit = -1


@dataclass(slots=True)
class SharedBatch:
    """Simulated worker that processes several units in a shared batch. While one unit is set up (prefill), the other
    units wait.

    As a simplification, a unit can join the batch in the middle of a step. The resulting error is less than one step
    for each unit that joins.
    """

    work: RoleWork
    """Lengths and times of the units that the worker can process."""
    slowness: float
    """Factor by which all times of this worker are multiplied."""
    _clock: float = 0.0
    """Time at which the step counter had the value `_step`. While a unit is set up, this is the time at which the setup
    ends."""
    _step: float = 0.0
    _ends: list[float] = field(default_factory=list)
    """Number of the step at which each sequence in the batch ends, in ascending order."""
    _units: dict[int, float] = field(default_factory=dict)
    """Number of the step at which each unit ends, by index of the unit."""
    _sums: DecodeSteps = field(default_factory=DecodeSteps)
    _began: dict[int, DecodeSteps] = field(default_factory=dict)

    def begin(self, unit: int, now: float) -> None:
        self._pass_time(now)
        self._clock = max(self._clock, now) + self.slowness * float(self.work.setup_U[unit])
        self._began[unit] = self._sums.copy()
        lengths = self.work.lengths_US[unit].tolist()
        for length in lengths:
            insort(self._ends, self._step + length)
        self._units[unit] = self._step + max(lengths)

    def next_end(self) -> tuple[float, int]:
        unit = min(self._units, key=self._units.__getitem__)
        last, pace = self._units[unit], self.work.pace
        sequence_steps = sum(min(end, last) - self._step for end in self._ends)
        seconds = pace.base_seconds * (last - self._step) + pace.per_sequence_seconds * sequence_steps
        return self._clock + self.slowness * seconds, unit

    def end(self, unit: int, now: float) -> DecodeSteps:
        last = self._units.pop(unit)
        while self._ends and self._ends[0] <= last:
            self._count(self._ends[0])
        self._clock = now
        return self._sums.since(self._began.pop(unit))

    def drop(self, unit: int) -> None:
        self._units.pop(unit)
        self._began.pop(unit)
        self._ends.clear()  # a worker that dies loses all of its units

    def _pass_time(self, now: float) -> None:
        while self._ends and self._clock < now:
            step_seconds = self._step_seconds()
            whole = self._ends[0] - self._step
            self._count(self._step + min(whole, (now - self._clock) / step_seconds))

    def _step_seconds(self) -> float:
        return self.slowness * (self.work.pace.base_seconds + self.work.pace.per_sequence_seconds * len(self._ends))

    def _count(self, step: float) -> None:
        """Advance the step counter to the given number. No sequence may end before this step."""
        steps, seconds = step - self._step, self._step_seconds()
        self._sums.add(steps, batch=len(self._ends), step_seconds=seconds)
        self._step, self._clock = step, self._clock + steps * seconds
        while self._ends and self._ends[0] <= step:
            self._ends.pop(0)


def unit_steps(work: RoleWork, unit: int, *, slowness: float) -> DecodeSteps:
    """Return the sums over the decoding steps of a unit that is decoded alone.

    Step t decodes all sequences with a length of at least t. Therefore the sum of squared batch sizes is Σ b² =
    Σ_ij min(ℓ_i, ℓ_j) over all pairs of sequence lengths ℓ.
    """
    ascending = sorted(work.lengths_US[unit].tolist())
    size = len(ascending)
    steps, sequences = ascending[-1], sum(ascending)
    squared = sum(length * (2 * (size - rank) - 1) for rank, length in enumerate(ascending))
    base, slope = slowness * work.pace.base_seconds, slowness * work.pace.per_sequence_seconds
    return DecodeSteps(
        steps=steps,
        sequences=sequences,
        sequences_squared=squared,
        seconds=base * steps + slope * sequences,
        sequence_seconds=base * sequences + slope * squared,
    )
