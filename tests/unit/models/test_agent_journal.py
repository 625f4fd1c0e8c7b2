"""Journal of episodes: ended episodes and answered requests that a later worker reads."""

import pytest

from rheostat.infra.store.storage import open_store
from rheostat.models.agents.branches import EpisodeRecord
from rheostat.models.agents.journal import EndedEpisode, EpisodeJournal
from rheostat.models.agents.stored_branches import Ending
from rheostat.models.config.agents import AgentEnvironment
from rheostat.models.engines.protocol import Completion
from rheostat.models.records.schemas import FinishReason
from rheostat.models.rollouts.groups import ChatMessage
from tests.support.rollout_workers import example

SETTINGS = AgentEnvironment(target="a:b")


@pytest.fixture
def store(tmp_path):
    return open_store(f"{tmp_path}/run")


@pytest.fixture
def work(store, tmp_path):
    return example(store, tmp_path / "policy")


def test_answers_are_found_by_a_later_worker_with_the_same_work_and_settings(store, work):
    answer = Completion((4, 5), (-0.1, -(2.0**-20)), "text", FinishReason.STOP)
    EpisodeJournal(store, work, SETTINGS).answers_of("2-0").add("request", answer)
    later = EpisodeJournal(store, work, SETTINGS)
    assert later.answers_of("2-0").find("request", max_tokens=9) == answer
    assert later.answers_of("2-1").find("request", max_tokens=9) is None
    others = EpisodeJournal(store, work, SETTINGS.model_copy(update={"max_requests": 3}))
    assert others.answers_of("2-0").find("request", max_tokens=9) is None


@pytest.mark.parametrize(
    ("reason", "max_tokens", "is_found"),
    [
        (FinishReason.STOP, 4, True),
        (FinishReason.STOP, 5, True),
        (FinishReason.STOP, 3, False),
        (FinishReason.LENGTH, 4, True),
        (FinishReason.LENGTH, 5, False),
    ],
)
def test_an_answer_is_used_if_sampling_with_the_present_limit_could_give_it(store, work, reason, max_tokens, is_found):
    answers = EpisodeJournal(store, work, SETTINGS).answers_of("2-0")
    answers.add("request", Completion((1, 2, 3, 4), (-0.5,) * 4, "", reason))
    assert (answers.find("request", max_tokens=max_tokens) is not None) == is_found


@pytest.mark.parametrize("content", [b"", b'{"tokens": [1, 2], "logpr'])
def test_objects_that_a_power_failure_has_damaged_are_deleted_and_recorded_again(store, work, content, caplog):
    answer = Completion((4,), (-0.5,), "text", FinishReason.STOP)
    EpisodeJournal(store, work, SETTINGS).answers_of("2-0").add("request", answer)
    [entry] = store.entries("episodes/")
    for key in (entry.key, f"{entry.key.rpartition('/')[0]}/end.json"):
        store.delete(key)
        store.put(key, content)
    journal = EpisodeJournal(store, work, SETTINGS)
    assert journal.answers_of("2-0").find("request", max_tokens=9) is None
    assert journal.ended == {} and store.entries("episodes/") == [] and "is damaged" in caplog.text
    journal.answers_of("2-0").add("request", answer)
    assert EpisodeJournal(store, work, SETTINGS).answers_of("2-0").find("request", max_tokens=9) == answer


def test_ended_episodes_are_read_back_and_the_journal_is_deleted(store, work):
    record = EpisodeRecord()
    number = record.open_turn(record.place_after(None, [1, 2]), seed=3)
    record.extend_turn(number, Completion((7, 8), (-0.25, -(2.0**-30)), "", FinishReason.STOP), 4)
    record.describe_turn(number, text="seven", calls=1)
    messages = (ChatMessage(role="tool", content="8", name="f"), ChatMessage(role="user", content="", name=None))
    ending = Ending(FinishReason.STOP, "", 0.5, {0: -1.0}, frozenset({0}), messages)
    journal = EpisodeJournal(store, work, SETTINGS)
    journal.add_ended("2-0", EndedEpisode.of(record.turns(), ending))
    later = EpisodeJournal(store, work, SETTINGS)
    [name] = later.ended
    assert (name, list(later.ended[name].turns), later.ended[name].ending) == ("2-0", record.turns(), ending)
    later.delete()
    assert not store.entries("episodes/")
    assert not EpisodeJournal(store, work, SETTINGS).ended
