"""Tables of the benchmark `gpu`: seconds per stage, comparison with the device's limit, and comparison with TRL."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.decoders import Decoder
from bench.device import DeviceSpeed, peak_flops
from bench.iterations import IterationSeconds
from bench.tables import Cell, Table
from bench.trl_workload import TrlIteration
from rheostat.placement.roofline import Generated, Limit, compute_utilization, train_flops


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """Measured times and sequence lengths of one training iteration.

    `limit` is the minimum time that the device would need for the iteration.
    """

    times: IterationSeconds
    generated: Generated
    limit: Limit

    @property
    def sequences(self) -> list[int]:
        """Length in tokens of each training sequence: prompt plus completion."""
        return [prompt + length for prompt, length in self.generated.contexts]


def seconds_per_stage(taken: Sequence[MeasuredIteration], decoder: Decoder) -> Table:
    """Build a table of the median seconds that each stage of a Rheostat iteration takes."""
    whole = _median(one.times.seconds for one in taken)
    stages: tuple[tuple[str, Callable[[IterationSeconds], float]], ...] = (
        ("server wakes up and loads weights", lambda spent: spent.load),
        ("generate", lambda spent: spent.generate),
        ("write the shard", lambda spent: spent.write),
        ("score", lambda spent: spent.score),
        ("server releases its memory", lambda spent: spent.sleep),
        ("credit", lambda spent: spent.credit),
        ("update", lambda spent: spent.update),
        ("  of which: log-probs of the old policy", lambda spent: spent.logprobs),
        ("  of which: optimizer steps", lambda spent: spent.steps),
        ("  of which: writing weights and state", lambda spent: spent.save),
        ("rest (flows, commits, starts)", lambda spent: spent.rest),
        ("whole iteration", lambda spent: spent.seconds),
    )
    rows = [(name, seconds, 100 * seconds / whole) for name, of in stages for seconds in [_of(taken, of)]]
    tokens = _median(one.generated.tokens for one in taken)
    return Table(
        title=f"Seconds per stage, {decoder.name}: {_workload(taken)}",
        columns=("stage", "seconds", "% of the iteration"),
        rows=tuple(rows),
        notes=(
            f"{tokens:,.0f} completion tokens: {tokens / _of(taken, lambda spent: spent.generate):,.0f} per second of "
            f"generation, {tokens / whole:,.0f} of the whole iteration",
            f"{_of(taken, lambda spent: spent.weights_bytes):,.0f} bytes of weights loaded by the server",
            f"medians of {len(taken)} iterations",
        ),
    )


def compare_with_limit(taken: Sequence[MeasuredIteration], decoder: Decoder, device: DeviceSpeed) -> Table:
    """Build a table that compares measured times with the minimum times at the device's full speed.

    A note states the model FLOP/s utilization (MFU).
    """
    stages: tuple[tuple[str, float, Cell], ...] = (
        ("prefill and decode", _median(one.limit.prefill + one.limit.decode for one in taken), "generate"),
        ("log-probs", _median(one.limit.logprobs for one in taken), "logprobs"),
        ("train and optimizer", _median(one.limit.train + one.limit.optimizer for one in taken), "steps"),
        ("whole iteration: eff_sync", _median(one.limit.seconds for one in taken), "seconds"),
    )
    rows = []
    for name, limit, measured in stages:
        seconds = _median(getattr(one.times, str(measured)) for one in taken)
        rows.append((name, limit, seconds, limit / seconds))
    peak, source = _peak(device)
    mfu = _median(compute_utilization(train_flops(decoder, one.sequences), one.times.steps, peak=peak) for one in taken)
    whole = _median(
        compute_utilization(train_flops(decoder, one.sequences), one.times.update, peak=peak) for one in taken
    )
    return Table(
        title=f"Compared with the physical limit, {decoder.name} on {device.name}",
        columns=("", "limit, s", "measured, s", "share"),
        rows=tuple(rows),
        notes=(
            f"the device was measured at {device.flops / 1e12:.3g} TFLOP/s and {device.bandwidth / 1e9:,.0f} GB/s",
            f"MFU {100 * mfu:.1f}% in the optimizer steps, {100 * whole:.1f}% over the whole update: 6·N·tokens and "
            f"attention against {peak / 1e12:.3g} TFLOP/s ({source})",
        ),
    )


def compare_with_trl(
    taken: Sequence[MeasuredIteration], theirs: Sequence[TrlIteration], decoder: Decoder, device: DeviceSpeed
) -> Table:
    """Build a table that compares the iteration times of Rheostat and TRL on the same prompts and lengths.

    TRL's cells are empty if `theirs` is empty.
    """
    peak, _ = _peak(device)
    ours_update = _median(one.times.steps + one.times.logprobs for one in taken)
    rows: list[tuple[Cell, ...]] = []

    def compare(name: str, ours: float, trl: Callable[[TrlIteration], float]) -> None:
        other = _median(map(trl, theirs)) if theirs else None
        rows.append((name, ours, "" if other is None else other, "" if other is None else other / ours))

    compare("whole iteration, s", _of(taken, lambda spent: spent.seconds), lambda one: one.seconds)
    compare(
        "generation, with wake-up, weights and release, s",
        _of(taken, lambda spent: spent.generate + spent.load + spent.sleep + spent.write + spent.score),
        lambda one: one.generation,
    )
    compare("of which: vLLM loads the weights, s", _of(taken, lambda spent: spent.load), lambda one: one.weights)
    compare("log-probs and optimizer steps, s", ours_update, lambda one: one.seconds - one.generation)
    mfu = [compute_utilization(train_flops(decoder, one.sequences), one.times.steps, peak=peak) for one in taken]
    eff = [one.limit.seconds / one.times.seconds for one in taken]
    pairs = list(zip(taken, theirs, strict=False))
    their_mfu = [
        compute_utilization(
            train_flops(decoder, one.sequences), trl.seconds - trl.generation - trl.old_logprobs, peak=peak
        )
        for one, trl in pairs
    ]
    their_eff = [one.limit.seconds / trl.seconds for one, trl in pairs]
    rows.append(("eff_sync", _median(eff), _median(their_eff) if pairs else "", ""))
    rows.append(("MFU of the optimizer steps", _median(mfu), _median(their_mfu) if pairs else "", ""))
    return Table(
        title=f"Compared with TRL's GRPOTrainer with colocated vLLM, {decoder.name}: {_workload(taken)}",
        columns=("", "Rheostat", "TRL", "times as fast"),
        rows=tuple(rows),
        notes=(
            "TRL computes the log-probs of the old policy for all samples, Rheostat for all except those of the first "
            "step",
            "Rheostat stores weights, optimizer state and completions durably; TRL stores nothing",
            *(() if theirs else ("TRL was not measured, because its environment is not installed",)),
        ),
    )


def _workload(taken: Sequence[MeasuredIteration]) -> str:
    made = taken[-1].generated
    lengths = [length for _, length in made.contexts]
    group = len(made.lengths[0])
    return (
        f"{len(made.prompts)} prompts × {group}, mean length {statistics.mean(lengths):.0f}, longest {max(lengths):,}"
    )


def _peak(device: DeviceSpeed) -> tuple[float, str]:
    """Return the peak FLOP/s of the device, and a text with the source of the number.

    The source is the data sheet, or a measurement if the device is unknown.
    """
    peak = peak_flops(device.name) if device.cuda else None
    return (
        (device.flops, "measured, because no data sheet is known for this device")
        if peak is None
        else (peak, "from the data sheet")
    )


def _of(taken: Sequence[MeasuredIteration], of: Callable[[IterationSeconds], float]) -> float:
    return _median(of(one.times) for one in taken)


def _median(values) -> float:
    return statistics.median(values)
