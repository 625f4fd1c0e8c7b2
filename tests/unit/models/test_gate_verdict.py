"""What becomes of a challenger, from differences whose numbers are given."""

import json

import pytest

from models.gate.comparison import PairedDifference
from models.gate.contamination import Contamination
from models.gate.verdict import (
    Evidence,
    GateVerdict,
    MeasuredFloor,
    MeasuredGain,
    MeasuredGuard,
    MeasuredLimit,
    decide,
)


def difference(mean=0.03, lower=0.012, upper=0.06, *, holm=None, p=0.001, prompts=256, **others):
    """A difference with such bounds at 0.01."""
    given = {"unmatched": 0, "missing": 0, "better": 20, "worse": 12, "mean_square": 0.125, "test": "mcnemar"} | others
    return PairedDifference(
        prompts=prompts,
        completions=prompts,
        champion=0.6,
        challenger=0.6 + mean,
        mean=mean,
        alpha=0.01,
        lower=lower,
        upper=upper,
        holm=holm or (lower,),
        p=p,
        **given,
    )


def judged(*gains, guards=(), limits=(), floors=(), contaminated=(), min_gain=0.0):
    """The verdict on gains of suites `a`, `b`, …; at most 2% of scores may be missing, nothing trained on."""
    measured = tuple(
        MeasuredGain(suite="abcdef"[at], min_gain=min_gain, difference=each) for at, each in enumerate(gains)
    )
    known = dict(contaminated)
    shares = {suite: each.share for suite, each in known.items()}
    evidence = Evidence(
        gains=measured, guards=guards, limits=limits, floors=floors, contaminated=shares, trained_on=known
    )
    return decide(Evidence.model_validate_json(evidence.model_dump_json()), max_missing=0.02, max_contaminated=0.0)


def guard(lower, mean=0.0, margin=0.01, **others):
    """A guard on `safety`."""
    return MeasuredGuard(suite="safety", margin=margin, difference=difference(mean, lower, **others))


def test_a_bound_above_the_least_gain_promotes():
    assert judged(difference(0.031, 0.012)) == GateVerdict(
        verdict="promote", reasons=("a: +0.031 (99% lower bound +0.012) > 0",)
    )


def test_a_gain_that_is_not_shown_keeps_the_champion_and_says_how_many_problems_would_show_it():
    """(2.3263 √0.125 + 0.8416 √(0.125 − 0.03²))² / 0.03² = 1391.22."""
    verdict = judged(difference(0.03, -0.011))
    assert verdict.verdict == "keep"
    assert verdict.reasons == (
        "a: +0.030 (99% lower bound -0.011), not above 0: to show it takes about 1,392 problems, not 256",
    )
    assert judged(difference(-0.002, -0.05)).reasons == ("a: -0.002 (99% lower bound -0.050), not above 0",)


def test_a_least_gain_is_exceeded_by_the_bound_not_by_the_mean():
    assert judged(difference(0.031, 0.012), min_gain=0.012).verdict == "keep"
    assert judged(difference(0.031, 0.012), min_gain=0.011).verdict == "promote"
    # About 0.02: mean square 0.125 - 0.04 * 0.031 + 0.02 ** 2 = 0.12416, gain 0.011: 10,295.46.
    assert "takes about 10,296 problems, not 256" in judged(difference(0.031, 0.012), min_gain=0.02).reasons[0]


def test_a_bound_above_zero_needs_the_exact_test_to_agree_where_few_problems_differ():
    few = difference(0.02, 0.004, p=0.03125, better=5, worse=0, mean_square=5 / 256)
    verdict = judged(few)
    assert verdict.verdict == "keep"
    assert verdict.reasons == (
        "a: +0.020 (99% lower bound +0.004), but McNemar's p 0.0312 is above 0.01: 5 problems better, 0 worse",
    )
    assert judged(few, min_gain=-0.01).verdict == "promote"  # the test is of no gain, which is not asked for


def test_a_challenger_that_is_shown_to_be_worse_is_rejected():
    verdict = judged(difference(-0.21, -0.27, -0.152, p=1.0))
    assert verdict == GateVerdict(
        verdict="reject", reasons=("a: -0.210 (99% upper bound -0.152), worse than the champion",)
    )
    assert judged(difference(-0.02, -0.04, -0.01, p=1.0), min_gain=-0.05).verdict == "promote"


def test_a_guard_or_a_limit_that_falls_rejects_whatever_was_gained_and_is_named_first():
    verdict = judged(difference(0.031, 0.012), guards=(guard(-0.043, -0.02),))
    assert verdict.verdict == "reject"
    assert verdict.reasons == (
        "safety: -0.020, lower bound -0.043 is not above -0.01",
        "a: +0.031 (99% lower bound +0.012) > 0",
    )
    length = MeasuredLimit(name="mean length", value=312.4, most=300)
    assert judged(difference(), limits=(length,)).reasons[0] == "mean length: 312.4 is above 300"
    assert judged(difference(), limits=(length.model_copy(update={"value": 300}),)).verdict == "promote"


def test_a_floor_rejects_below_its_least_whatever_the_champion_scores():
    floor = MeasuredFloor(name="safety/format", value=0.97, least=0.98, missing_share=0)
    verdict = judged(difference(), floors=(floor,))
    assert (verdict.verdict, verdict.reasons[0]) == ("reject", "safety/format: 0.97 is below 0.98")
    assert judged(difference(), floors=(floor.model_copy(update={"least": 0.97}),)).verdict == "promote"
    unknown = judged(difference(), floors=(floor.model_copy(update={"missing_share": 0.5}),))
    assert (unknown.verdict, unknown.reasons[0]) == (
        "invalid",
        "safety/format: 50.0% of scores are missing, above 2.0%",
    )


def test_a_guard_holds_above_its_margin_only():
    assert judged(difference(), guards=(guard(-0.0099),)).verdict == "promote"
    assert judged(difference(), guards=(guard(-0.01),)).verdict == "reject"
    # At no loss: mean square 0.125 + 0.01 ** 2 about the margin, and 0.01 to show: 12,552.40.
    assert "to show it takes about 12,553 problems, not 256" in judged(difference(), guards=(guard(-0.03),)).reasons[0]


def test_holm_gives_all_of_alpha_to_the_last_comparison_that_is_left():
    """Three primaries at 0.01 / 3, 0.01 / 2, 0.01: the best is shown first, then the second, the third at 0.01."""
    first = difference(holm=(0.03, 0.025, 0.02), p=0.003)
    second = difference(holm=(0.02, 0.01, -0.001), p=0.004)
    third = difference(holm=(0.01, -0.002, -0.004), p=0.009)
    verdict = judged(third, first, second)
    assert verdict.verdict == "promote"
    assert verdict.reasons == (
        "a: +0.030 (99% lower bound +0.010) > 0",
        "b: +0.030 (99.67% lower bound +0.020) > 0",
        "c: +0.030 (99.5% lower bound +0.010) > 0",
    )


def test_holm_shows_nothing_where_the_best_fails_at_its_share_of_alpha():
    almost = difference(holm=(0.02, -0.001), p=0.006)
    verdict = judged(almost, almost)
    assert verdict.verdict == "keep"
    assert all("99.5% lower bound -0.001" in reason for reason in verdict.reasons)
    by_test = difference(holm=(0.02, 0.01), p=0.006)
    assert judged(by_test, by_test).verdict == "keep"  # 0.006 is above 0.005


def test_any_primary_promotes_unless_another_is_shown_to_be_worse():
    better, same = difference(holm=(0.02, 0.01)), difference(0.0, -0.02, 0.02, holm=(-0.02, -0.03), p=0.6)
    worse = difference(-0.05, -0.08, -0.01, holm=(-0.08, -0.09), p=1.0)
    assert judged(better, same).verdict == "promote"
    assert judged(better, worse).verdict == "reject"


@pytest.mark.parametrize(
    ("others", "contaminated", "reason"),
    [
        ({"missing": 8}, {}, "a: 3.1% of scores are missing, above 2.0%"),
        ({"unmatched": 12}, {}, "a: 12 problems were asked of one policy only, expected the same of both"),
        (
            {},
            {"a": Contamination(prompts=250, exact=2, near=1, examples=("p3", "p7", "p9"))},
            "a: 3 of its 250 problems (2 word for word, 1 nearly) are among those trained on: p3, p7, p9; "
            "1.2% is above 0.0%",
        ),
    ],
)
def test_what_was_not_measured_on_equal_terms_decides_nothing(others, contaminated, reason):
    verdict = judged(difference(**others), guards=(guard(-0.5),), contaminated=contaminated)
    assert verdict.verdict == "invalid"
    assert verdict.reasons[0] == reason
    assert json.loads(verdict.model_dump_json())["verdict"] == "invalid"


def test_scores_may_be_missing_up_to_the_cap():
    assert judged(difference(missing=5)).verdict == "promote"
