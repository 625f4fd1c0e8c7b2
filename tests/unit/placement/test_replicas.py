"""Several reward models share the slots of scoring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import BadInput
from placement.slots import allot, least_slots


def test_fixed_replicas_come_first_and_the_rest_goes_round_largest_first():
    assert allot(16, {"small": 1, "big": 4, "fixed": 2}, fixed={"fixed": 3}) == {"small": 2, "big": 2, "fixed": 3}


def test_what_no_replica_fits_into_stays_empty():
    assert allot(7, {"a": 3, "b": 3}, fixed={}) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("slots", "fixed", "message"),
    [
        ({"big": 4, "small": 1}, {}, "1 × 'big' of 4 slots and 1 × 'small' of 1 slots need 5 worker slots, found 4"),
        ({"judge": 1, "style": 1}, {"judge": 4}, "4 × 'judge' .* need 5 worker slots, found 4"),
        ({"judge": 1}, {"jugde": 2}, "no served reward is called 'jugde', did you mean 'judge'"),
    ],
)
def test_what_does_not_fit_is_named(slots, fixed, message):
    with pytest.raises(BadInput, match=message):
        allot(4, slots, fixed=fixed)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 5), min_size=1),
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 3)),
    st.integers(0, 40),
)
def test_every_term_has_a_replica_none_is_torn_and_no_more_would_fit(slots, fixed, extra):
    fixed = {term: count for term, count in fixed.items() if term in slots}
    total = least_slots(slots, fixed=fixed) + extra
    replicas = allot(total, slots, fixed=fixed)
    left = total - sum(slots[term] * count for term, count in replicas.items())
    assert min(replicas.values()) >= 1 and left >= 0
    assert all(replicas[term] == count for term, count in fixed.items())
    assert all(size > left for term, size in slots.items() if term not in fixed)
