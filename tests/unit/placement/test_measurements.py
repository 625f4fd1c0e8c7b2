"""Measurements of stages, from which placement policies decide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.placement.measurements import LineSums, Measurements, Prior, UnitObservation, fit_line
from rheostat.placement.records import Pace


def build_unit(role="rollout", *, lengths, base=0.005, slope=0.0002, setup=0.01, unit=0.5, detail=64):
    """Build a unit whose engine decoded these lengths as one batch. Finished sequences leave the batch."""
    lengths_S = np.sort(np.asarray(lengths, dtype=float))
    steps = np.arange(1, int(lengths_S.max()) + 1)
    batch = (lengths_S[:, None] >= steps).sum(axis=0)
    seconds = base + slope * batch
    at = np.linspace(0, len(lengths_S) - 1, min(len(lengths_S), detail)).round().astype(int)
    return UnitObservation(
        role=role,
        sequences=len(lengths_S),
        seconds=float(seconds.sum()) + unit + setup * len(lengths_S),
        steps=len(steps),
        step_sequences=float(batch.sum()),
        step_sequences_squared=float((batch**2).sum()),
        step_seconds=float(seconds.sum()),
        step_sequence_seconds=float((seconds * batch).sum()),
        lengths=tuple(lengths_S[at]),
    )


def stage(count=8, *, median=100, seed=0, size=32, **others):
    rng = np.random.default_rng(seed)
    sizes = size if isinstance(size, tuple) else (size,) * count
    return [build_unit(lengths=np.ceil(median * np.exp(0.5 * rng.standard_normal(b))), **others) for b in sizes]


def test_the_pace_is_fitted_to_engine_steps_and_other_time_is_a_constant_per_unit():
    known = Measurements().observe(stage(size=(16, 32, 64)))
    pace = known.demand("rollout", units=8, sequences=32).pace
    assert (pace.base_seconds, pace.per_sequence_seconds) == pytest.approx((0.005, 0.0002))
    assert (pace.unit_seconds, pace.setup_seconds) == pytest.approx((0.5, 0.01))
    equal = Measurements().observe(stage(size=32)).demand("rollout", units=8, sequences=32).pace
    assert equal.unit_seconds + 32 * equal.setup_seconds == pytest.approx(0.5 + 0.32)


def test_a_constant_batch_size_keeps_the_prior_ratio_and_the_measured_mean():
    sums = LineSums(count=100, x=800, xx=6400, y=10.0, xy=80.0)
    base, slope = fit_line(sums, prior=(0.02, 0.0025))
    assert base + 8 * slope == pytest.approx(0.1)
    assert base / slope == pytest.approx(8)
    assert fit_line(LineSums(), prior=(1.0, 2.0)) == (1.0, 2.0)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 10)), min_size=1, max_size=20))
def test_no_pace_is_negative(points):
    x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    sums = LineSums(count=len(x), x=x.sum(), xx=(x * x).sum(), y=y.sum(), xy=(x * y).sum())
    assert min(fit_line(sums, prior=(0.01, 0.001))) >= 0


def test_the_pace_of_a_new_engine_is_adopted_within_a_few_stages():
    known = Measurements().observe(stage())
    for seed in range(5):
        known = known.observe(stage(base=0.05, seed=seed))
    assert known.demand("rollout", units=8, sequences=32).pace.base_seconds == pytest.approx(0.05, rel=0.1)


def test_lengths_are_a_sorted_sample_half_of_which_comes_from_the_last_stage():
    known = Measurements().observe(stage(40, median=100)).observe(stage(40, median=1000))
    lengths = np.array(known.demand("rollout", units=8, sequences=32).lengths)
    assert len(lengths) <= 512 and (np.diff(lengths) >= 0).all()
    assert 0.4 < (lengths > 400).mean() < 0.6


def test_thinning_a_sample_of_lengths_keeps_its_mean_and_its_tail():
    rng = np.random.default_rng(1)
    units = [np.ceil(100 * np.exp(rng.standard_normal(64))) for _ in range(64)]
    everything = np.concatenate(units)
    kept = np.array(Measurements().observe([build_unit(lengths=unit) for unit in units]).rollout.lengths)
    assert len(kept) == 512
    assert kept.mean() == pytest.approx(everything.mean(), rel=0.03)
    assert np.quantile(kept, 0.99) == pytest.approx(np.quantile(everything, 0.99), rel=0.1)


def test_order_statistics_represent_all_sequences_of_their_unit():
    few, many = build_unit(lengths=[10] * 4), build_unit(lengths=range(100, 356), detail=16)
    lengths = Measurements().observe([few, many]).rollout.lengths
    assert len(lengths) == 4 + 256
    assert lengths[-1] == 355


def test_similar_lengths_within_a_unit_are_detected():
    rng = np.random.default_rng(2)
    alike = [
        build_unit(lengths=np.ceil(np.exp(5 + 0.4 * rng.standard_normal() + 0.4 * rng.standard_normal(32))))
        for _ in range(40)
    ]
    free = [build_unit(lengths=np.ceil(np.exp(5 + 0.4 * rng.standard_normal(32)))) for _ in range(40)]
    assert Measurements().observe(alike).rollout.likeness == pytest.approx(0.5, abs=0.15)
    assert Measurements().observe(free).rollout.likeness == pytest.approx(0, abs=0.02)


def test_drift_is_distinguished_from_chance():
    still, moving = Measurements(), Measurements()
    for number in range(8):
        still = still.observe(stage(16, seed=number))
        moving = moving.observe(stage(16, seed=number, median=100 * 4 ** (number % 2)))
    assert still.demand("rollout", units=8, sequences=32).drift < 0.1
    assert moving.demand("rollout", units=8, sequences=32).drift == 1.0  # bounded


def test_busy_seconds_are_a_moving_average_with_seven_tenths_of_the_old_value():
    unit = UnitObservation(role="scoring", sequences=1, seconds=100)
    known = Measurements().observe([unit]).observe([unit.model_copy(update={"seconds": 200.0})])
    assert known.scoring.busy_seconds == pytest.approx(0.7 * 100 + 0.3 * 200)
    assert known.rollout.busy_seconds == 0


def test_all_time_of_a_role_without_steps_is_time_outside_of_steps():
    units = [UnitObservation(role="scoring", sequences=b, seconds=1 + 0.1 * b) for b in (8, 16, 32)]
    pace = Measurements().observe(units).demand("scoring", units=3, sequences=8).pace
    assert (pace.base_seconds, pace.per_sequence_seconds) == (0, 0)
    assert (pace.unit_seconds, pace.setup_seconds) == pytest.approx((1, 0.1))


def test_the_prior_is_used_before_the_first_measurement():
    prior = Prior(median_tokens=50, sigma=1.0, max_tokens=200, pace=Pace(base_seconds=1, per_sequence_seconds=2))
    demand = Measurements().demand("rollout", units=4, sequences=8, prior=prior)
    assert demand.pace == prior.pace and not demand.measured
    assert np.median(demand.lengths) == pytest.approx(50, rel=0.05) and max(demand.lengths) == 200
    assert Measurements().observe(stage()).demand("rollout", units=4, sequences=8, prior=prior).measured


def test_moves_are_averaged_and_their_95th_percentile_is_kept():
    known = Measurements().observe([], moves=[1.0] * 19 + [11.0])
    assert known.resize().mean_seconds == pytest.approx(0.7 * 1 + 0.3 * 11)
    assert 1 < known.resize().p95_seconds < 11
    assert Measurements().resize().mean_seconds > 0


def test_measurements_round_trip_through_json_and_depend_only_on_the_stages():
    known = Measurements().observe(stage(40), moves=[2.0]).observe(stage(40, seed=1))
    assert Measurements.model_validate_json(known.model_dump_json()) == known
    assert Measurements().observe(stage(40), moves=[2.0]).observe(stage(40, seed=1)) == known
