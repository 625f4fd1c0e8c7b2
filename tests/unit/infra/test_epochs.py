"""Looks whether an epoch is over, which commits share."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.store.epochs import Shared
from tests.support.jobs import wait_for


def test_who_asks_while_a_question_is_under_way_gets_no_answer_of_before():
    state, answers, put, go_on = ["before"], [], threading.Event(), threading.Event()

    def question() -> str:
        found = state[0]
        answers.append(found)
        put.set()
        go_on.wait(10)
        return found

    shared = Shared(question)
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(shared.ask)
        assert put.wait(10)
        state[0] = "after"
        begun = threading.active_count()
        later = [threads.submit(shared.ask) for _ in range(8)]
        assert wait_for(lambda: threading.active_count() == begun + 8, seconds=10)
        go_on.set()
        assert first.result() == "before" and {each.result() for each in later} == {"after"}
    assert answers[0] == "before" and 2 <= len(answers) <= 9


def test_what_a_question_raises_is_raised_to_all_and_the_next_may_be_answered():
    answers = iter([OSError("away")])

    def question() -> str:
        for error in answers:
            raise error
        return "back"

    shared = Shared(question)
    with pytest.raises(OSError, match="away"):
        shared.ask()
    assert shared.ask() == "back"
