"""Judges behind an endpoint, against a real local server that behaves as it is told."""

import json
import logging
import time

import pytest

from infra.errors import BadInput, EndpointDown, WorkerFailed
from models.config.engines import SamplingConfig
from models.config.judges import ChoiceVerdict, LogprobVerdict
from models.judges.verdicts import Question
from models.records.seeds import derive_seed
from tests.support.chat_server import Reply, chat_server, says
from tests.support.endpoint_judges import CANARY, judge_at, questions


def echo(asked, before):
    return says(f"about {asked.text}")


def fails_now_and_then(asked, before):
    """Fail three attempts in ten; the first of them is decided by the question, so that the test repeats itself."""
    unlucky = derive_seed(asked.text, before) % 10 < 3
    return Reply(status=503) if unlucky else echo(asked, before)


def test_a_question_is_sent_as_a_chat_completion_with_its_seed_and_sampling():
    with chat_server(echo) as server:
        sampling = SamplingConfig(temperature=0.3, top_p=0.8, max_new_tokens=7, stop=("\n",))
        [answer] = judge_at(server.url, sampling=sampling).ask([Question(text="Is it so?", seed=2**40 + 5)])
    [asked] = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "judge",
        "messages": [{"role": "user", "content": "Is it so?"}],
        "seed": 5,
        "temperature": 0.3,
        "top_p": 0.8,
        "max_tokens": 7,
        "stop": ["\n"],
    }
    assert (answer.text, answer.tokens, answer.error) == ("about Is it so?", 4, None)


def test_answers_keep_the_order_of_their_questions_and_no_more_than_the_cap_are_under_way():
    def slower_first(asked, before):
        number = int(asked.text.split()[-1])
        return Reply(body=echo(asked, before).body, seconds=0.002 * (40 - number))

    with chat_server(slower_first) as server:
        answers = judge_at(server.url, concurrency=4).ask(questions(40))
    assert [answer.text for answer in answers] == [f"about question {number}" for number in range(40)]
    assert server.most_at_once == 4


def test_a_server_that_fails_now_and_then_answers_all_in_the_end():
    with chat_server(fails_now_and_then) as server:
        judge = judge_at(server.url, retries=8)
        answers = judge.ask(questions(60))
    assert [answer.text for answer in answers] == [f"about question {number}" for number in range(60)]
    assert len(server.asked) > 65
    assert judge.progress == len(server.asked)


@pytest.mark.parametrize(
    "fault",
    [
        Reply(reset=True),
        Reply(status=408),
        Reply(status=409),
        Reply(status=500),
        Reply(status=502),
        Reply(body=b"{}", stall_seconds=3),
        Reply(body=b"{}", seconds=3),
    ],
    ids=["reset", "408", "409", "500", "502", "stalled", "slow"],
)
def test_a_fault_that_passes_is_asked_again(fault):
    with chat_server(lambda asked, before: fault if before == 0 else echo(asked, before)) as server:
        answers = judge_at(server.url, timeout_seconds=1.5).ask(questions(3))
    assert [answer.error for answer in answers] == [None] * 3
    assert len(server.asked) == 6


def test_retry_after_is_obeyed():
    def busy(asked, before):
        return Reply(status=429, headers={"Retry-After": "1"}) if before == 0 else echo(asked, before)

    with chat_server(busy) as server:
        [answer] = judge_at(server.url).ask(questions(1))
    first, second = server.asked
    assert answer.error is None
    assert 1.0 <= second.at - first.at < 5.0


@pytest.mark.parametrize("status", [500, 503])
def test_an_endpoint_that_stays_down_is_a_named_error_in_bounded_time(status):
    with chat_server(lambda asked, before: Reply(status=status)) as server:
        judge = judge_at(server.url, retries=3)
        started = time.monotonic()
        with pytest.raises(
            EndpointDown, match=r"127\.0\.0\.1:\d+/v1/chat/completions is down: it answers 50"
        ) as caught:
            judge.ask(questions(200))
    assert time.monotonic() - started < 10
    assert len(server.asked) <= 32 * 4 + 32  # it gives up after the first question that is lost, not after all
    assert isinstance(caught.value, OSError)  # what stages try again later


def test_nobody_listening_is_an_endpoint_that_is_down():
    with chat_server(echo) as server:
        pass
    with pytest.raises(EndpointDown, match="attempt 2 of 2"):
        judge_at(server.url, retries=1).ask(questions(2))


def test_a_judge_goes_on_where_the_endpoint_comes_back():
    state = {"up": False}
    with chat_server(lambda asked, before: echo(asked, before) if state["up"] else Reply(reset=True)) as server:
        judge = judge_at(server.url, retries=1)
        with pytest.raises(EndpointDown):
            judge.ask(questions(3))
        state["up"] = True
        assert [answer.error for answer in judge.ask(questions(3))] == [None] * 3


def test_a_question_that_a_server_falls_over_is_its_own_error():
    def poisoned(asked, before):
        return Reply(status=500) if asked.text == "question 1" else echo(asked, before)

    with chat_server(poisoned) as server:
        answers = judge_at(server.url, retries=2).ask(questions(4))
    assert [answer.text is None for answer in answers] == [False, True, False, False]
    assert "500" in answers[1].error


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_a_refusal_is_raised_at_once(status):
    reply = Reply(status=status, body=b'{"error": "no such model"}')
    with (
        chat_server(lambda asked, before: reply) as server,
        pytest.raises(WorkerFailed, match=rf"answered {status} .*no such model"),
    ):
        judge_at(server.url, concurrency=2).ask(questions(50))
    assert len(server.asked) <= 4


def test_a_redirect_is_refused():
    with chat_server(echo) as other:
        away = Reply(status=307, headers={"Location": f"{other.url}/chat/completions"})
        with (
            chat_server(lambda asked, before: away) as server,
            pytest.raises(WorkerFailed, match=r"answered 307 .* no redirect"),
        ):
            judge_at(server.url).ask(questions(1))
    assert other.asked == []


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(body=b"<html>busy</html>"), "no chat completion"),
        (Reply(body=b""), "no chat completion"),
        (Reply(body=b'{"choices": []}'), "choices"),
        (Reply(body=b'{"object": "error"}'), "choices"),
        (Reply(body=b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'), "no chat completion"),
        (Reply(body=b'{"choices": [{"message": {"content": "\\ud800"}}]}'), "no chat completion"),
        (Reply(body=b"[" * 100_000), "no chat completion"),
        (says(""), "empty"),
        (Reply(body=b'{"choices": [{"message": {"content": null}}]}'), "empty"),
        (Reply(body=b'{"choices": [{"message": {"content": 7}}]}'), "content"),
        (says("x" * (5 << 20)), "longer than"),
        (Reply(status=400, body=b"too long for this model"), "too long for this model"),
    ],
)
def test_what_is_no_answer_is_an_error_and_never_a_value(reply, error):
    with chat_server(lambda asked, before: reply) as server:
        [answer] = judge_at(server.url).ask(questions(1))
    assert answer.text is None
    assert answer.probabilities is None
    assert error in answer.error
    assert "\n" not in answer.error
    assert len(server.asked) == 1


def test_an_answer_that_was_cut_is_an_error_beside_its_text():
    with chat_server(lambda asked, before: says("score: 1", finish_reason="length")) as server:
        [answer] = judge_at(server.url).ask(questions(1))
    assert answer.text == "score: 1"  # of 10, perhaps
    assert "not finished" in answer.error


def test_a_long_answer_is_read_whole():
    with chat_server(lambda asked, before: says("x" * (1 << 20))) as server:
        [answer] = judge_at(server.url).ask(questions(1))
    assert answer.text == "x" * (1 << 20)


def test_a_logprob_verdict_reads_the_likely_first_tokens():
    def likely(asked, before):
        top = [{"token": token, "logprob": logprob} for token, logprob in ((" Yes", -0.5), ("yes", -2.0), ("no", -3.0))]
        return says("Yes", logprobs={"content": [{"token": " Yes", "logprob": -0.5, "top_logprobs": top}]})

    with chat_server(likely) as server:
        [answer] = judge_at(server.url, verdict=LogprobVerdict()).ask(questions(1))
    [asked] = server.asked
    assert (asked.body["logprobs"], asked.body["top_logprobs"], asked.body["max_tokens"]) == (True, 20, 1)
    assert answer.probabilities == pytest.approx({"yes": 0.741866, "no": 0.049787}, abs=1e-6)  # e^-0.5 + e^-2, e^-3


def test_a_token_counts_for_the_one_answer_that_it_begins():
    top = [{"token": token, "logprob": -1.0} for token in (" Tr", "true", "t", "f", "falsely", " ")]
    reply = says("t", logprobs={"content": [{"top_logprobs": top}]})
    with chat_server(lambda asked, before: reply) as server:
        [answer] = judge_at(server.url, verdict=LogprobVerdict(yes="true", no="tough")).ask(questions(1))
        [other] = judge_at(server.url, verdict=LogprobVerdict(yes="true", no="false")).ask(questions(1))
    share = 0.367879  # e^-1
    assert answer.probabilities == pytest.approx({"true": 2 * share, "tough": 0}, abs=1e-5)  # `t` begins both
    assert other.probabilities == pytest.approx({"true": 1, "false": share}, abs=1e-5)  # three shares are more than 1


@pytest.mark.parametrize("logprob", ["NaN", "Infinity", "3.5", '"-1"', "null"])
def test_a_log_prob_that_is_none_is_an_error(logprob):
    body = '{"choices": [{"message": {"content": "yes"}, "logprobs": {"content": [{"top_logprobs": [%s]}]}}]}'
    reply = Reply(body=(body % f'{{"token": "yes", "logprob": {logprob}}}').encode())
    with chat_server(lambda asked, before: reply) as server:
        [answer] = judge_at(server.url, verdict=LogprobVerdict()).ask(questions(1))
    assert (answer.probabilities, "logprob" in answer.error) == (None, True)


def test_neither_choice_among_the_likely_tokens_is_an_error():
    top = [{"token": "maybe", "logprob": -0.1}]
    reply = says("maybe", logprobs={"content": [{"top_logprobs": top}]})
    with chat_server(lambda asked, before: reply) as server:
        [answer] = judge_at(server.url, verdict=LogprobVerdict()).ask(questions(1))
    assert answer.probabilities is None
    assert "among the likely first tokens" in answer.error


def test_a_constrained_choice_is_asked_of_vllm_and_refused_elsewhere():
    with chat_server(lambda asked, before: says("no")) as server:
        [answer] = judge_at(server.url, verdict=ChoiceVerdict(), guided="vllm").ask(questions(1))
        with pytest.raises(BadInput, match="constrained"):
            judge_at(server.url, verdict=ChoiceVerdict())
    assert server.asked[0].body["structured_outputs"] == {"choice": ["yes", "no"]}
    assert answer.text == "no"


def test_the_key_is_sent_and_shows_nowhere_else(monkeypatch, caplog, capfd):
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    caplog.set_level(logging.DEBUG)
    repeats = Reply(status=403, body=json.dumps({"error": f"the key {CANARY} is not known"}).encode())
    replies = {"question 0": echo, "question 1": lambda asked, before: Reply(status=400, body=repeats.body)}
    with chat_server(lambda asked, before: replies.get(asked.text, lambda *_: repeats)(asked, before)) as server:
        judge = judge_at(server.url, api_key_variable="JUDGE_KEY")
        answers = judge.ask(questions(2))
        with pytest.raises(WorkerFailed) as caught:
            judge.ask(questions(3)[2:])
    assert server.asked[0].headers["Authorization"] == f"Bearer {CANARY}"
    shown = [
        caplog.text,
        *capfd.readouterr(),
        repr(answers),
        repr(caught.value),
        *getattr(caught.value, "__notes__", ()),
    ]
    assert CANARY not in "".join(shown)
    assert "the key *** is not known" in str(caught.value)


@pytest.mark.parametrize("key", ["", f"{CANARY} and more", f"{CANARY}\nX-Other: 1", f"{CANARY}é"])
def test_a_key_that_cannot_be_sent_is_bad_input_and_is_not_repeated(monkeypatch, key):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(BadInput, match="JUDGE_KEY") as caught:
        judge_at("http://127.0.0.1:1/v1", api_key_variable="JUDGE_KEY")
    assert CANARY not in str(caught.value)


def test_a_proxy_or_a_netrc_of_the_environment_changes_nothing(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with chat_server(echo) as proxy, chat_server(echo) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        judge_at(server.url).ask(questions(1))
    assert (len(server.asked), len(proxy.asked)) == (1, 0)
    assert "Authorization" not in server.asked[0].headers
