"""SIGINT and SIGTERM end `rheostat train` in every state. docs/faults.md states how soon."""

import re
import signal

import pytest

from tests.support.interruptions import SIGNALS, STATES, interrupt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def check(state, number, home, api, **how):
    ended = interrupt(state, number, home, api, **how)
    print(f"{state}: {ended.seconds:.1f} s, and {ended.gone_seconds:.1f} s until nothing was left")  # noqa: T201
    assert ended.code in (128 + number, -number), ended.output  # the latter while Python starts, and by SIGKILL
    if ended.code > 0:
        assert ended.output.splitlines()[-1] == "rheostat: interrupted; run the same command again to continue"
        assert not re.search("Traceback|ERROR", ended.output)
    assert ended.left == []


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("state", STATES)
def test_a_signal_ends_the_job_and_all_that_it_has_started(state, number, tmp_path, prefect_api):
    check(state, number, tmp_path, prefect_api)


@pytest.mark.parametrize("state", ["a reward's module is imported to be checked", "rollout", "the job closes"])
def test_sigint_ends_a_job_that_was_started_with_sigint_ignored(state, tmp_path, prefect_api):
    check(state, signal.SIGINT, tmp_path, prefect_api, ignores=(signal.SIGINT,))


def test_a_killed_command_leaves_no_check_of_its_inputs_behind(tmp_path, prefect_api):
    check("a reward's module is imported to be checked", signal.SIGKILL, tmp_path, prefect_api)
