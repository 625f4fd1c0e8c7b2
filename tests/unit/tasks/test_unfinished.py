"""Retrains that are unfinished when the command of the next day is run."""

from datetime import date

import pytest

from rheostat.flows.cli.registry import require_finished
from rheostat.infra.errors import BadInput
from rheostat.infra.store.registry import open_registry
from rheostat.infra.store.runs import create_run
from rheostat.tasks.config.run import override_config
from rheostat.tasks.promotion.draft import draft_retrain, find_unfinished
from tests.support.champions import append_record
from tests.support.demos import ARITHMETIC

MONDAY, TUESDAY, WEDNESDAY = (date(2026, 11, day) for day in (9, 10, 11))
RULES = {"registry": "assistant", "primary": {"suite": "heldout", "min_gain": 0}}


def job(store, **settings):
    return override_config({"name": "job", "data": ARITHMETIC, "store": str(store), **settings}, [], source="job")


def begin(store, *names):
    for name in names:
        create_run(str(store), name, {"iterations": 2})


def test_the_newest_earlier_retrain_without_a_result_is_not_finished(tmp_path):
    begin(tmp_path, "job-20261108", "job-20261109", "job-99999999", "job-20261110.sums.challenger", "other-20261110")
    assert find_unfinished(job(tmp_path), TUESDAY) == MONDAY


@pytest.mark.parametrize("names", [(), ("job-20261109", "job-20261110")])
def test_a_day_may_begin_without_earlier_retrains_and_continue_after_it_was_begun(tmp_path, names):
    begin(tmp_path, *names)
    assert find_unfinished(job(tmp_path), TUESDAY) is None


def test_a_gated_retrain_is_finished_with_its_record_and_not_with_its_draft(tmp_path):
    config = job(tmp_path / "store", promotion=RULES)
    draft_retrain(config.model_copy(update={"name": "job-20261109"}))
    assert find_unfinished(config, TUESDAY) == MONDAY
    registry = open_registry(config.store, "assistant")
    append_record(registry, tmp_path, "a", run="job-20261109")
    assert find_unfinished(config, WEDNESDAY) is None


def test_the_message_names_the_retrain_and_both_ways_to_continue(tmp_path):
    begin(tmp_path, "job-20261109")
    with pytest.raises(BadInput, match=r"job-20261109 .* 2026-11-10 .*--day 2026-11-09, .* --new"):
        require_finished(job(tmp_path), today=TUESDAY)
