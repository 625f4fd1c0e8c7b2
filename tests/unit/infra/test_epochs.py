"""Lookups of the current epoch that concurrent commits share."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rheostat.infra.store.epochs import SharedCall
from tests.support.jobs import wait_for


def test_a_call_during_a_lookup_does_not_get_an_older_answer():
    state, answers, put, go_on = ["before"], [], threading.Event(), threading.Event()

    def question() -> str:
        found = state[0]
        answers.append(found)
        put.set()
        go_on.wait(600)
        return found

    def ask_later() -> str:
        begun.append(True)
        return shared.call()

    shared, begun = SharedCall(question), []
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(shared.call)
        assert put.wait(600)
        state[0] = "after"
        later = [threads.submit(ask_later) for _ in range(8)]
        assert wait_for(lambda: len(begun) == 8)
        go_on.set()
        assert first.result() == "before" and {each.result() for each in later} == {"after"}
    assert answers[0] == "before" and 2 <= len(answers) <= 9


def test_an_error_of_a_lookup_is_raised_and_the_next_lookup_may_succeed():
    answers = iter([OSError("away")])

    def question() -> str:
        for error in answers:
            raise error
        return "back"

    shared = SharedCall(question)
    with pytest.raises(OSError, match="away"):
        shared.call()
    assert shared.call() == "back"
