"""Turns of an earlier iteration: a restarted program gets them again, and a turn that was cut continues."""

from dataclasses import replace

import pytest

from rheostat.models.agents.earlier import EarlierTurns
from rheostat.models.agents.sampler import OpenEpisode, SamplingWish, TurnSampler
from rheostat.models.agents.stored_branches import Ending, continues, fill, read
from rheostat.models.agents.wire import RefusedRequest
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.protocol import Completion
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.rollouts.groups import PartialCompletion, Segment
from tests.support.doors import LIMITS

END = 99
WISH = SamplingWish()
DRAFT = PartialCompletion(seed=11, input=ModelInput.from_prompt([40, 41]))


def decode(tokens):
    return " ".join(map(str, tokens))


class Policy:
    """Policy whose turns are the numbers after the last token of their context, with the length `length`."""

    def __init__(self, version, length=4):
        self.version, self.length, self.requests = version, length, []

    def generate(self, requests, sampling):
        self.requests += requests
        return [[self.complete(request)] for request in requests]

    def complete(self, request):
        """Return the rest of a turn. The turn ends with END after `length` tokens."""
        [model_input] = request.inputs
        begun = model_input.completion.tolist()
        first = int(model_input.prompt[-1]) + 1
        whole = [*range(first, first + self.length - 1), END]
        limit = min(request.max_tokens, len(begun) + (request.budget or request.max_tokens))
        assert whole[: len(begun)] == begun and limit > len(begun)
        new = whole[len(begun) : limit]
        reason = FinishReason.STOP if len(begun) + len(new) == len(whole) else FinishReason.CUT
        return Completion(tuple(new), (-0.5,) * len(new), decode(begun + new), reason)

    def sample(self, episode, parent, context, wish=WISH):
        sampler = TurnSampler(self.generate, SamplingConfig(max_new_tokens=500), self.version)
        [sampled] = sampler.sample(episode, [episode.record.place_after(parent, context)], wish)
        return sampled

    def is_cut(self, episode, parent, context):
        """Return whether a request is refused because the episode is cut."""
        with pytest.raises(RefusedRequest) as refused:
            self.sample(episode, parent, context)
        return (refused.value.status, refused.value.code) == (409, "episode_cut")


def open_episode(draft=DRAFT, budget=None):
    """Return an episode that continues a stored completion."""
    earlier = EarlierTurns(read(draft).turns(), decode=decode, ends=[END])
    return OpenEpisode(seed=draft.seed, limits=LIMITS, earlier=earlier, budget=budget)


def store(episode, begun=0):
    """Return the completion of a cut episode."""
    record = type(episode.record)(episode.earlier.add_unused(episode.record.turns()))
    ending = Ending(FinishReason.CUT, replayed=frozenset(episode.replayed), begun=begun)
    return fill(record, DRAFT, ending, decode=decode)


def cut_after(tokens):
    """Return the stored completion of an episode whose only turn was cut after a number of tokens."""
    episode = open_episode(budget=tokens)
    assert Policy(0).is_cut(episode, None, [5])
    return store(episode)


class Journal:
    """Answers of an episode, in memory."""

    def __init__(self):
        self.found = {}

    def find(self, request, /, *, max_tokens):
        return self.found.get(request)

    def add(self, request, completion, /):
        self.found[request] = completion


def tokens_of(episode):
    return [turn.tokens for turn in episode.record.turns()]


def test_a_turn_is_cut_at_the_budget_and_continues_from_its_tokens_with_the_next_policy():
    first, second = Policy(0), Policy(1)
    episode = open_episode(budget=6)
    assert first.sample(episode, None, [5]).text == "6 7 8 99"
    assert first.is_cut(episode, 0, [20])
    assert tokens_of(episode) == [(6, 7, 8, END), (21, 22)]
    assert first.is_cut(episode, 0, [30]), "a cut episode has no further requests"
    draft = store(episode)

    again = open_episode(draft)
    sampled = second.sample(again, None, [5])
    assert (sampled.text, sampled.turn.finish_reason, second.requests) == ("6 7 8 99", FinishReason.STOP, [])
    assert second.sample(again, 0, [20]).text == "21 22 23 99"
    [request] = second.requests
    assert (request.seeds, request.inputs[0].completion.tolist()) == ((episode.record.turn(1).seed,), [21, 22])
    assert again.record.turn(1).segments == (Segment(0, 2), Segment(1, 2))
    assert again.replayed == {0, 1}
    assert second.sample(again, 1, [50]).turn.segments == (Segment(1, 4),)
    assert continues(read(store(again)), read(draft), version=1)


def test_a_budget_that_is_used_up_by_whole_turns_cuts_the_next_request():
    policy = Policy(0)
    episode = open_episode(budget=4)
    policy.sample(episode, None, [5])
    assert not episode.is_cut
    assert policy.is_cut(episode, 0, [20])
    assert tokens_of(episode) == [(6, 7, 8, END)]
    again = open_episode(store(episode), budget=4)
    later = Policy(1)
    later.sample(again, None, [5])
    later.sample(again, 0, [20])
    assert (len(later.requests), later.requests[0].budget) == (1, 4), "a replayed turn uses no budget"


def test_an_episode_that_is_cut_by_time_has_no_further_turns():
    policy = Policy(0)
    episode = open_episode(budget=100)
    policy.sample(episode, None, [5])
    episode.cut()
    assert policy.is_cut(episode, 0, [20])
    assert (tokens_of(episode), episode.num_sampling) == ([(6, 7, 8, END)], 0)


def test_a_turn_that_reaches_its_length_limit_is_not_cut():
    policy = Policy(0, length=50)
    episode = open_episode(budget=30)
    sampled = policy.sample(episode, None, [5], SamplingWish(max_tokens=3))
    assert (sampled.turn.tokens, sampled.turn.finish_reason, episode.is_cut) == ((6, 7, 8), FinishReason.LENGTH, False)
    again = open_episode(store(episode))
    assert Policy(1).sample(again, None, [5], SamplingWish(max_tokens=3)).turn.segments == (Segment(0, 3),)
    other = open_episode(store(episode))
    assert Policy(1, length=50).sample(other, None, [5], SamplingWish(max_tokens=4)).turn.segments == (Segment(1, 4),)


def test_an_agent_that_sends_other_requests_gets_new_turns_and_the_stored_ones_are_counted():
    first, second = Policy(0), Policy(1)
    episode = open_episode(budget=9)
    first.sample(episode, None, [5])
    first.sample(episode, 0, [20])
    assert first.is_cut(episode, 1, [30])
    draft = store(episode)
    again = open_episode(draft)
    second.sample(again, None, [5])
    second.sample(again, 0, [25])
    assert [turn.segments for turn in again.record.turns()] == [(Segment(0, 4),), (Segment(1, 4),)]
    assert (again.replayed, again.earlier.num_unused) == ({0}, 2)
    ended = fill(again.record, DRAFT, Ending(FinishReason.STOP), decode=decode)
    assert continues(read(ended), read(draft), version=1)


@pytest.mark.parametrize(("stop", "is_replayed"), [((), True), (("7",), False), (("77",), True)])
def test_a_stored_turn_is_used_if_sampling_with_the_stop_texts_of_the_request_could_give_it(stop, is_replayed):
    episode = open_episode()
    Policy(0).sample(episode, None, [5])
    again = open_episode(store(episode))
    sampled = Policy(1).sample(again, None, [5], SamplingWish(stop=stop))
    assert (sampled.turn.segments == (Segment(0, 4),)) == is_replayed


def test_a_stored_turn_that_ended_with_a_stop_text_is_not_used_without_that_stop_text():
    episode = open_episode()
    number = episode.record.open_turn(episode.record.place_after(None, [5]), seed=episode.seed)
    episode.record.extend_turn(number, Completion((6, 7), (-0.5,) * 2, "6 7", FinishReason.STOP), 0)
    with_text, without = open_episode(store(episode)), open_episode(store(episode))
    assert Policy(1).sample(with_text, None, [5], SamplingWish(stop=("7",))).turn.tokens == (6, 7)
    assert Policy(1).sample(without, None, [5]).turn.tokens == (6, 7, 8, END)


def test_a_cut_episode_keeps_stored_turns_that_its_agent_has_not_requested_again():
    policy = Policy(0)
    episode = open_episode()
    policy.sample(episode, None, [5])
    policy.sample(episode, None, [60])
    policy.sample(episode, 0, [20])
    policy.sample(episode, 1, [70])
    policy.sample(episode, 2, [30])
    draft = store(episode)
    again, later = open_episode(draft), Policy(1)
    later.sample(again, None, [80])  # a request that was not sent before
    later.sample(again, None, [60])
    cut = store(again)
    record = read(cut)
    assert [turn.context for turn in record.turns()] == [(80,), (60,), (5,), (20,), (70,), (30,)]
    assert [turn.parent for turn in record.turns()] == [None, None, None, 2, 1, 3]
    assert [turn.replayed for turn in sorted(cut.turns, key=lambda turn: turn.order)] == [False, True, *[False] * 4]
    assert continues(record, read(draft), version=1)
    last = open_episode(cut)
    for parent, context in ((None, [5]), (0, [20]), (1, [30])):
        Policy(2).sample(last, parent, context)
    assert {turn.segments for turn in last.record.turns()} == {(Segment(0, 4),)}


def test_stored_turns_after_a_turn_that_was_sampled_again_are_dropped():
    policy = Policy(0)
    episode = open_episode()
    policy.sample(episode, None, [5])
    policy.sample(episode, 0, [20])
    again = open_episode(store(episode))
    Policy(1, length=3).sample(again, None, [5], SamplingWish(max_tokens=3))
    assert [turn.tokens for turn in again.earlier.add_unused(again.record.turns())] == [(6, 7, END)]


def test_a_stored_turn_does_not_follow_a_younger_turn():
    """Verification refuses a turn of an older policy than the turn that it continues."""
    policy = Policy(0)
    episode = open_episode()
    policy.sample(episode, None, [5])
    policy.sample(episode, 0, [20])
    draft = store(episode)
    stored = read(draft).turns()
    again = OpenEpisode(seed=11, limits=LIMITS, earlier=EarlierTurns(stored[1:], decode=decode, ends=[END]))
    for parent, context in ((None, [5]), (0, [20])):
        Policy(1).sample(again, parent, context)
    assert [turn.segments for turn in again.record.turns()] == [(Segment(1, 4),)] * 2


def test_a_recorded_answer_is_not_added_to_the_stored_beginning_of_another_turn():
    """The answer was recorded by a run of the program whose limit was too small for the stored beginning."""
    journal, draft = Journal(), cut_after(3)
    first = open_episode(draft)
    first.answers = journal
    Policy(1, length=2).sample(first, None, [5], SamplingWish(max_tokens=2))
    assert len(journal.found) == 1
    again, policy = open_episode(draft), Policy(1)
    again.answers = journal
    assert policy.sample(again, None, [5]).turn.tokens == (6, 7, 8, END)
    assert len(policy.requests) == 1


def test_equal_requests_get_different_stored_turns():
    episode, policy = open_episode(), Policy(0)
    for length in (4, 3):
        policy.length = length
        policy.sample(episode, None, [5])
    again, later = open_episode(store(episode)), Policy(1)
    turns = [later.sample(again, None, [5]).turn.tokens for _ in range(3)]
    assert turns == [(6, 7, 8, END), (6, 7, END), (6, 7, 8, END)]
    assert len(later.requests) == 1


def test_a_cut_episode_stores_the_version_with_which_it_began():
    none = store(open_episode(), begun=3)
    assert (none.segments, none.turns, none.find_first_version(9)) == ((Segment(3, 0),), (), 3)
    assert read(none).turns() == []
    episode = open_episode()
    Policy(4).sample(episode, None, [5])
    assert store(episode, begun=3).segments == (Segment(3, 0), Segment(4, 4))
    assert read(store(episode, begun=3)).turns() == episode.record.turns()
    assert store(episode, begun=4).segments == (Segment(4, 4),)
    ended = fill(episode.record, DRAFT, Ending(FinishReason.STOP), decode=decode)
    assert ended.segments == (Segment(4, 4),)


def test_a_record_with_changed_or_repeated_older_turns_does_not_continue_an_earlier_one():
    episode = open_episode()
    Policy(0).sample(episode, None, [5])
    earlier = read(store(episode))
    [turn] = earlier.turns()
    younger = replace(turn, segments=(Segment(1, 4),))
    for turns, is_right in (
        ([turn], True),
        ([], True),
        ([younger], True),
        ([replace(turn, tokens=(6, 7, 9, END))], False),
        ([replace(turn, logprobs=(-0.25,) * 4)], False),
        ([replace(turn, key="other")], False),
        ([turn, replace(turn, number=1, occurrence=1)], False),
    ):
        assert continues(type(earlier)(turns), earlier, version=1) == is_right
