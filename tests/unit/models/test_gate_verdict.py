"""Verdicts of the gate on a challenger, from measured differences."""

import pytest

from rheostat.models.gate.comparison import PairedDifference
from rheostat.models.gate.contamination import Contamination
from rheostat.models.gate.verdict import (
    Evidence,
    GateVerdict,
    MeasuredFloor,
    MeasuredGain,
    MeasuredGuard,
    MeasuredLimit,
    decide,
)


def difference(mean=0.03, lower=0.012, upper=0.06, *, holm=None, p=0.001, **changes):
    """Return a difference over 256 problems with these bounds at level 0.01."""
    numbers = {"prompts": 256, "completions": 256, "champion": 0.6, "challenger": 0.6 + mean, "mean": mean, "p": p}
    numbers |= {"alpha": 0.01, "lower": lower, "upper": upper, "holm": holm or (lower,), "test": "mcnemar"}
    numbers |= {
        "method": "exact",
        "score_range": (0, 1),
        "unmatched": 0,
        "missing": 0,
        "better": 20,
        "worse": 12,
        "mean_square": 0.125,
    }
    return PairedDifference(**numbers | changes)


def guard(lower, mean=0.0):
    return MeasuredGuard(suite="safety", margin=0.01, difference=difference(mean, lower))


UNBOUNDED_GUARD = MeasuredGuard(
    suite="safety", margin=0.01, difference=difference(method="bootstrap", score_range=None)
)


def limit(value):
    return MeasuredLimit(name="mean length", value=value, most=300)


def floor(value, *, missing_share=0):
    return MeasuredFloor(name="safety/format", value=value, least=0.98, missing_share=missing_share)


def decide_on(*gains, min_gain=0.0, contaminated=None, **measured) -> GateVerdict:
    """Decide on gains of suites `a`, `b`, …; at most 2% of scores may be missing, none may be trained on."""
    suites = tuple(
        MeasuredGain(suite=name, min_gain=min_gain, difference=each) for name, each in zip("abc", gains, strict=False)
    )
    known = contaminated or {}
    shares = {suite: each.share for suite, each in known.items()}
    evidence = Evidence(
        **{"gains": suites, "guards": (), "limits": (), "floors": (), "contaminated": shares, "trained_on": known}
        | measured
    )
    verdict = decide(Evidence.model_validate_json(evidence.model_dump_json()), max_missing=0.02, max_contaminated=0.0)
    return GateVerdict.model_validate_json(verdict.model_dump_json())


GAIN = difference(0.031, 0.012)
SHOWN = ["a: ", "+0.031", "99% lower bound +0.012", "> 0"]
FEW = difference(0.02, 0.004, p=0.03125, better=5, worse=0, mean_square=5 / 256, method="bootstrap", score_range=None)
LOSS = difference(-0.21, -0.27, -0.152, p=1.0)
ALMOST = difference(holm=(0.02, -0.001), p=0.006)
# At alpha 0.01 Holm's levels for three suites are 0.01 / 3, 0.01 / 2 and 0.01, from the best suite to the last.
BEST = difference(holm=(0.03, 0.025, 0.02), p=0.003)
SECOND = difference(holm=(0.02, 0.01, -0.001), p=0.004)
THIRD = difference(holm=(0.01, -0.002, -0.004), p=0.009)
CONTAMINATION = Contamination(prompts=250, exact=2, near=1, examples=("p3", "p7", "p9"))


@pytest.mark.parametrize(
    ("gains", "others", "verdict", "reasons"),
    [
        ([GAIN], {}, "promote", [SHOWN]),
        # (2.3263 √0.125 + 0.8416 √(0.125 - 0.03²))² / 0.03² = 1391.22
        ([difference(0.03, -0.011)], {}, "keep", [["a: +0.030", "-0.011", "not above 0", "1,392 problems, not 256"]]),
        ([difference(-0.002, -0.05)], {}, "keep", [["a: -0.002", "-0.050", "not above 0"]]),
        # about 0.02: mean square 0.125 - 0.04 * 0.031 + 0.02² = 0.12416, gain 0.011: 10,295.46
        ([GAIN], {"min_gain": 0.02}, "keep", [["a: +0.031", "not above 0.02", "10,296 problems, not 256"]]),
        ([FEW], {}, "keep", [["a: +0.020", "+0.004", "p 0.0312", "0.01", "5 problems better, 0 worse"]]),
        ([LOSS], {}, "reject", [["a: -0.210", "99% upper bound -0.152", "worse"]]),
        ([GAIN], {"guards": (guard(-0.043, -0.02),)}, "reject", [["safety: -0.020", "-0.043", "-0.01"], SHOWN]),
        # about a margin without loss: mean square 0.125 + 0.01², 0.01 to show: 12,552.40
        ([GAIN], {"guards": (guard(-0.03),)}, "reject", [["safety: ", "12,553 problems, not 256"], SHOWN]),
        ([GAIN], {"limits": (limit(312.4),)}, "reject", [["mean length: 312.4", "above 300"], SHOWN]),
        ([GAIN], {"floors": (floor(0.97),)}, "reject", [["safety/format: 0.97", "below 0.98"], SHOWN]),
        (
            [THIRD, BEST, SECOND],
            {},
            "promote",
            [["a: ", "99% ", "+0.010", "> 0"], ["b: ", "99.67% ", "+0.020", "> 0"], ["c: ", "99.5% ", "+0.010", "> 0"]],
        ),
        ([ALMOST, ALMOST], {}, "keep", [["a: ", "99.5% lower bound -0.001"], ["b: ", "99.5% lower bound -0.001"]]),
    ],
)
def test_a_verdict_names_the_measured_numbers_and_its_bounds(gains, others, verdict, reasons):
    decision = decide_on(*gains, **others)
    assert decision.verdict == verdict
    for reason, parts in zip(decision.reasons, reasons, strict=True):
        assert [part for part in parts if part not in reason] == [], reason


def test_no_number_of_problems_is_named_for_a_gain_below_zero():
    assert "problems" not in decide_on(difference(-0.002, -0.05)).reasons[0]


UNBOUNDED = difference(holm=(0.02, 0.01), p=0.006, method="bootstrap", score_range=None)
SAME = difference(0.0, -0.02, 0.02, holm=(-0.02, -0.03), p=0.6)
BETTER, WORSE = difference(holm=(0.02, 0.01)), difference(-0.05, -0.08, -0.01, holm=(-0.08, -0.09), p=1.0)


@pytest.mark.parametrize(
    ("gains", "others", "verdict"),
    [
        pytest.param([GAIN], {"min_gain": 0.012}, "keep", id="the bound equals the minimum gain"),
        pytest.param([GAIN], {"min_gain": 0.011}, "promote", id="the bound exceeds the minimum gain"),
        pytest.param([FEW], {"min_gain": -0.01}, "promote", id="the test of no gain does not matter"),
        pytest.param([difference(-0.02, -0.04, -0.01, p=1.0)], {"min_gain": -0.05}, "promote", id="an allowed loss"),
        pytest.param([GAIN], {"limits": (limit(300),)}, "promote", id="exactly the limit"),
        pytest.param([GAIN], {"floors": (floor(0.98),)}, "promote", id="exactly the floor"),
        pytest.param([GAIN], {"guards": (guard(-0.0099),)}, "promote", id="a guard above its margin"),
        pytest.param([GAIN], {"guards": (guard(-0.01),)}, "reject", id="a guard at its margin"),
        pytest.param([UNBOUNDED] * 2, {}, "keep", id="p is above Holm's level of 0.005"),
        pytest.param([difference(p=0.3)], {}, "promote", id="an exact bound needs no further test"),
        pytest.param([BETTER, SAME], {}, "promote", id="one suite of two is better"),
        pytest.param([BETTER, WORSE], {}, "reject", id="one suite is better and another is worse"),
        pytest.param([difference(missing=5)], {}, "promote", id="2% of the scores are missing"),
    ],
)
def test_bounds_decide_between_verdicts(gains, others, verdict):
    assert decide_on(*gains, **others).verdict == verdict


@pytest.mark.parametrize(
    ("gain", "others", "parts"),
    [
        (difference(missing=8), {}, ["a: 3.1% of the scores are missing", "2.0%"]),
        (difference(unmatched=12), {}, ["a: only one of the two policies answered 12 problems"]),
        (
            difference(),
            {"contaminated": {"a": CONTAMINATION}},
            ["a: 3 of 250 problems (2 ", ", 1 ", "p3, p7, p9", "1.2%", "0.0%"],
        ),
        (difference(), {"floors": (floor(0.97, missing_share=0.5),)}, ["safety/format: 50.0%", "2.0%"]),
        (difference(), {"guards": (UNBOUNDED_GUARD,)}, ["safety: ", "a guard", "known range"]),
    ],
)
def test_measurements_that_are_incomplete_or_contaminated_give_no_verdict_even_if_a_guard_fails(gain, others, parts):
    decision = decide_on(gain, **{"guards": (guard(-0.5),)} | others)
    assert decision.verdict == "invalid"
    assert [part for part in parts if part not in decision.reasons[0]] == [], decision.reasons
