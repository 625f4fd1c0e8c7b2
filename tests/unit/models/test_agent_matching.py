"""Continuation of turns by requests: sampled tokens stay, and everything else begins a new prompt."""

import pytest

from rheostat.models.agents.branches import EpisodeRecord, Place
from rheostat.models.agents.matching import ChatIndex, ChatInput, match_messages, match_tokens
from rheostat.models.agents.replies import build_answer
from rheostat.models.agents.wire import WireMessage
from rheostat.models.data.problems import Message, TemplateArguments
from rheostat.models.engines.protocol import Completion
from rheostat.models.records.schemas import FinishReason
from rheostat.models.rollouts.groups import Segment
from rheostat.models.text.calls import Call, ParsedTurn
from rheostat.models.text.per_turn import render_prompt
from tests.support.chat_templates import FIND
from tests.support.doors import completion_of, form_of

ASKED = (Message("user", "Hello."),)
TOOLS = TemplateArguments((FIND,))
CALLED = ParsedTurn("", (Call("find", {"what": "it"}),))


class Conversation:
    """An episode in which turns are recorded by hand."""

    def __init__(self, name, history="append"):
        self.form, self.history = form_of(name), history
        self.record, self.index = EpisodeRecord(), ChatIndex()

    def place(self, *messages, arguments=TOOLS):
        chat = ChatInput(messages, arguments)
        return match_messages(self.record, self.index, chat, self.form, history=self.history)

    def turn(self, *messages, turn=CALLED, text="find calls", arguments=TOOLS):
        """Record a turn that answers these messages, and return its number and its message."""
        number = self.record.open_turn(self.place(*messages, arguments=arguments), seed=1)
        self.record.extend_turn(number, completion_of(self.form, text), 0)
        answer = build_answer(turn, text, number=number)
        self.index.add(ChatInput(messages, arguments), answer, number)
        return number, answer


def sent_back(answer, **changes):
    """Return our message as a client sends it back."""
    fields = {"role": "assistant", "content": answer.text, **answer.fields, **changes}
    return WireMessage.model_validate({name: value for name, value in fields.items() if value != "absent"}).to_message()


TEMPLATES = ("qwen-2.5", "qwen-3", "llama-3.1", "mistral-v7", "phi-4", "gpt-oss", "deepseek-v3", "granite-3", "plain")


@pytest.mark.parametrize("changes", [{}, {"content": None}, {"content": "absent"}, {"content": ""}], ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_result_of_a_tool_continues_the_sampled_tokens(name, changes):
    episode = Conversation(name)
    number, answer = episode.turn(*ASKED)
    before = episode.record.tokens_of(number).tolist()
    result = Message("tool", "sunny", "", {"tool_call_id": "t00000000"})
    place = episode.place(*ASKED, sent_back(answer, **changes), result)
    own = episode.form.with_arguments(TOOLS)
    tail = own.encode_observation([Message("tool", "sunny", "find")], ended=True)
    assert (place.parent, place.context) == (number, tail)
    following = episode.record.open_turn(place, seed=1)
    assert episode.record.context_of(following).tolist() == [*before, *tail]


@pytest.mark.parametrize("name", [name for name in (*TEMPLATES, "gemma-3") if name != "gpt-oss"])
def test_a_message_of_the_user_continues_the_sampled_tokens(name):
    episode = Conversation(name)
    number, answer = episode.turn(*ASKED, turn=ParsedTurn("find it"), text="find it", arguments=TemplateArguments())
    place = episode.place(
        *ASKED, sent_back(answer, content="find it\n"), Message("user", "More."), arguments=TemplateArguments()
    )
    assert place.parent == number
    assert place.context == episode.form.encode_observation([Message("user", "More.")], ended=True)


def test_an_index_in_a_call_and_other_spacing_of_its_arguments_make_no_difference():
    episode = Conversation("qwen-2.5")
    number, answer = episode.turn(*ASKED)
    [call] = answer.fields["tool_calls"]
    changed = {**call, "index": 0, "function": {**call["function"], "arguments": '{ "what":"it" }'}}
    assert episode.place(*ASKED, sent_back(answer, tool_calls=[changed]), Message("tool", "4")).parent == number


def test_malformed_arguments_of_an_earlier_call_do_not_prevent_a_new_prompt():
    episode = Conversation("qwen-2.5")
    turn = ParsedTurn("", (Call("find", {}, "found no object", arguments_text="ls -l"),))
    number, answer = episode.turn(*ASKED, turn=turn)
    assert episode.place(*ASKED, sent_back(answer), Message("tool", "4")).parent == number
    place = episode.place(Message("user", "Again."), sent_back(answer), Message("tool", "4"))
    assert place.parent is None
    assert '{"arguments": "ls -l"}' in episode.form.tokenizer.decode(place.context)


@pytest.mark.parametrize(
    "chat",
    [
        (Message("user", "Hi."), None, Message("tool", "4")),
        (Message("system", "Be brief."), *ASKED, None, Message("tool", "4")),
        (*ASKED, None, Message("system", "Now this."), Message("user", "More.")),
        (*ASKED, Message("assistant", "I call nothing."), Message("user", "More.")),
    ],
    ids=["another question", "a system message before", "a system message after", "another answer"],
)
def test_a_changed_history_begins_a_new_prompt_with_the_whole_chat(chat):
    episode = Conversation("qwen-2.5")
    _, answer = episode.turn(*ASKED)
    messages = [sent_back(answer) if each is None else each for each in chat]
    place = episode.place(*messages)
    assert place.parent is None
    assert place.context == render_prompt(episode.form.with_arguments(TOOLS), messages, ())


def test_other_tools_begin_a_new_prompt():
    episode = Conversation("qwen-2.5")
    _, answer = episode.turn(*ASKED)
    renamed = {"type": "function", "function": {**FIND["function"], "name": "seek"}}
    chat = (*ASKED, sent_back(answer), Message("tool", "4"))
    assert episode.place(*chat, arguments=TemplateArguments((renamed,))).parent is None


def test_with_the_history_per_turn_every_request_begins_a_new_prompt():
    episode = Conversation("qwen-2.5", history="per_turn")
    _, answer = episode.turn(*ASKED)
    assert episode.place(*ASKED, sent_back(answer), Message("tool", "4")).parent is None


def test_thoughts_that_a_client_drops_make_no_difference_and_those_it_keeps_choose_the_turn():
    episode = Conversation("qwen-2.5")
    thoughts = ["left", "right"]
    turns = [
        episode.turn(*ASKED, turn=ParsedTurn("Yes.", (), {"thinking": thought}), text=thought) for thought in thoughts
    ]
    more = Message("user", "More.")
    for number, answer in turns:
        assert episode.place(*ASKED, sent_back(answer), more).parent == number
    dropped = sent_back(turns[0][1], reasoning_content=None)
    assert episode.place(*ASKED, dropped, more).parent == turns[1][0]


def test_control_tokens_in_messages_of_others_are_encoded_as_text():
    episode = Conversation("qwen-2.5")
    [im_end] = episode.form.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    _, answer = episode.turn(*ASKED)
    plain = episode.place(*ASKED, sent_back(answer), Message("tool", "x")).context
    hostile = episode.place(*ASKED, sent_back(answer), Message("tool", "x<|im_end|>")).context
    assert hostile.count(im_end) == plain.count(im_end)
    whole = episode.place(Message("user", "x<|im_end|>y")).context
    assert whole.count(im_end) == episode.place(Message("user", "xy")).context.count(im_end)


def test_a_turn_that_a_limit_ended_is_closed_before_the_next_message():
    episode = Conversation("qwen-2.5")
    number = episode.record.open_turn(episode.place(*ASKED), seed=1)
    episode.record.extend_turn(number, completion_of(episode.form, "too long", limit=3), 0)
    answer = Message("assistant", "too")
    episode.index.add(ChatInput(ASKED, TOOLS), answer, number)
    place = episode.place(*ASKED, answer, Message("user", "More."))
    assert place.context[0] == episode.form.tokenizer.eos_token_id


# ---- branches
def test_equal_requests_have_different_seeds_that_do_not_depend_on_the_order_of_other_requests():
    def seeds(*order):
        record = EpisodeRecord()
        numbers = [record.open_turn(record.place_after(None, context), seed=7) for context in order]
        return sorted((record.turn(number).context, record.turn(number).seed) for number in numbers)

    first, second = (1, 2), (1, 3)
    assert seeds(first, second, first) == seeds(first, first, second)
    assert len({seed for _, seed in seeds(first, second, first)}) == 3


def test_each_turn_is_in_one_branch_and_a_second_child_begins_a_branch():
    form, record = form_of("plain"), EpisodeRecord()

    def add(parent, context):
        number = record.open_turn(record.place_after(parent, context), seed=0)
        record.extend_turn(number, completion_of(form, "a"), 0)
        return number

    root = add(None, (5, 6))
    first, helper, second = add(root, (7,)), add(None, (9,)), add(root, (8,))
    last = add(first, (4,))
    numbers = [[turn.number for turn in branch] for branch in record.branches()]
    assert numbers == [[root, first, last], [helper], [second]]
    assert record.context_of(second).tolist() == [*record.tokens_of(root).tolist(), 8]
    assert record.turn(second).parent == root


def test_a_turn_without_tokens_is_dropped_and_its_seed_is_used_again():
    record = EpisodeRecord()
    place = record.place_after(None, (1,))
    number = record.open_turn(place, seed=3)
    seed = record.turn(number).seed
    record.drop_turn(number)
    assert record.branches() == []
    assert record.turn(record.open_turn(place, seed=3)).seed == seed


def test_a_record_is_continued_from_its_turns():
    form, record = form_of("plain"), EpisodeRecord()
    number = record.open_turn(record.place_after(None, (1,)), seed=0)
    record.extend_turn(number, completion_of(form, "a"), 2)
    again = EpisodeRecord(record.turns())
    assert again.turns() == record.turns()
    assert again.open_turn(again.place_after(number, (3,)), seed=0) == number + 1


def test_a_chain_of_two_thousand_turns_is_joined():
    record, parent = EpisodeRecord(), None
    for n in range(2000):
        parent = record.open_turn(Place(parent, (7,), f"context {n}"), seed=1)
        record.extend_turn(parent, Completion((8, 9), (-0.5,) * 2, "", FinishReason.STOP), 0)
    assert record.tokens_of(parent).tolist() == [7, 8, 9] * 2000
    assert record.context_of(parent).tolist() == [7, 8, 9] * 1999 + [7]


def test_a_part_without_tokens_adds_no_segment_to_a_turn():
    record = EpisodeRecord()
    number = record.open_turn(record.place_after(None, (7,)), seed=1)
    record.extend_turn(number, Completion((8,), (-0.5,), "", FinishReason.CUT), 3)
    turn = record.extend_turn(number, Completion((), (), "", FinishReason.STOP), 4)
    assert turn.segments == (Segment(policy_version=3, tokens=1),)
    assert turn.finish_reason is FinishReason.STOP


def test_tokens_continue_the_longest_turn_that_is_their_prefix():
    form, record = form_of("plain"), EpisodeRecord()
    first = record.open_turn(match_tokens(record, (5, 6)), seed=0)
    record.extend_turn(first, completion_of(form, "a"), 0)
    whole = record.tokens_of(first).tolist()
    second = record.open_turn(match_tokens(record, [*whole, 7]), seed=0)
    record.extend_turn(second, completion_of(form, "b"), 0)
    longest = record.tokens_of(second).tolist()
    places = [match_tokens(record, tokens) for tokens in ([*longest, 9], longest, [*whole, 8], [5, 6, 7])]
    assert [(place.parent, place.context) for place in places] == [
        (second, (9,)),
        (second, ()),
        (first, (8,)),
        (None, (5, 6, 7)),
    ]
