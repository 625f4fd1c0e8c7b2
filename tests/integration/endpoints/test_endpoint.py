"""Judges behind an endpoint: a real local server whose replies the tests define."""

import base64
import logging
import re
import threading
from types import SimpleNamespace

import pytest

from rheostat.infra.errors import BadInput, EndpointDown, WorkerFailed
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict
from rheostat.models.judges.verdicts import Question
from rheostat.models.records.seeds import derive_seed
from tests.support.chat_server import Reply, chat_server, reply_with
from tests.support.endpoint_judges import CANARY, judge_at, questions


def echo(asked, before):
    return reply_with(f"about {asked.text}")


def ask_once(reply, **settings):
    """Query a judge with one question that a server answers with a reply. Return the answer and the requests."""
    with chat_server(lambda asked, before: reply) as server:
        [answer] = judge_at(server.url, **settings).answer(questions(1))
    return answer, server.asked


def with_top_logprobs(text, **logprobs):
    """Reply with a text and the log-probs of its likely first tokens."""
    top = [{"token": token, "logprob": logprob} for token, logprob in logprobs.items()]
    return reply_with(text, logprobs={"content": [{"top_logprobs": top}]})


def test_a_question_is_sent_as_a_chat_completion_with_its_seed_and_sampling():
    with chat_server(echo) as server:
        sampling = SamplingConfig(temperature=0.3, top_p=0.8, max_new_tokens=7, stop=("\n",))
        [answer] = judge_at(server.url, sampling=sampling).answer([Question(text="Is it so?", seed=2**40 + 5)])
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


def test_answers_keep_the_order_of_their_questions_and_the_cap_on_concurrent_requests():
    four = threading.Barrier(4)

    def reply_to_every_fourth_last(asked, before):
        number = int(asked.text.split()[-1])
        four.wait(60)
        return Reply(body=echo(asked, before).body, seconds=0.01 * (number % 4 == 0))

    with chat_server(reply_to_every_fourth_last) as server:
        answers = judge_at(server.url, concurrency=4, timeout_seconds=60).answer(questions(40))
    assert [answer.text for answer in answers] == [f"about question {number}" for number in range(40)]
    assert server.most_at_once == 4


def test_all_requests_succeed_on_a_server_with_temporary_failures():
    def fail_three_of_ten(asked, before):
        return Reply(status=503) if derive_seed(asked.text, before) % 10 < 3 else echo(asked, before)

    with chat_server(fail_three_of_ten) as server:
        judge = judge_at(server.url, retries=8)
        answers = judge.answer(questions(60))
    assert [answer.text for answer in answers] == [f"about question {number}" for number in range(60)]
    assert len(server.asked) > 65
    assert judge.progress == len(server.asked)


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        (Reply(reset=True), {}),
        *((Reply(status=status), {}) for status in (408, 409, 500, 502)),
        (Reply(body=b"{}", stall_seconds=60), {"timeout_seconds": 2}),
        (Reply(body=b"{}", seconds=60), {"timeout_seconds": 2}),
    ],
    ids=["reset", "408", "409", "500", "502", "stalled", "slow"],
)
def test_a_request_with_a_temporary_failure_is_retried(fault, settings):
    with chat_server(lambda asked, before: fault if before == 0 else echo(asked, before)) as server:
        answers = judge_at(server.url, **settings).answer(questions(3))
    assert [answer.error for answer in answers] == [None] * 3
    assert len(server.asked) == 6


def test_retry_after_is_obeyed():
    def reply_busy_once(asked, before):
        return Reply(status=429, headers={"Retry-After": "1"}) if before == 0 else echo(asked, before)

    with chat_server(reply_busy_once) as server:
        [answer] = judge_at(server.url).answer(questions(1))
    first, second = server.asked
    assert answer.error is None
    assert second.at - first.at >= 1.0


@pytest.mark.parametrize("status", [500, 503])
def test_judging_stops_after_the_first_question_lost_to_an_endpoint_that_stays_down(status):
    with chat_server(lambda asked, before: Reply(status=status)) as server:
        judge = judge_at(server.url, retries=3)
        down = rf"127\.0\.0\.1:\d+/v1/chat/completions did not answer .* 4 attempts.* {status} "
        with pytest.raises(EndpointDown, match=down) as caught:
            judge.answer(questions(200))
    assert len(server.asked) <= 32 * 4 + 32  # not 200 questions times 4 attempts
    assert isinstance(caught.value, OSError)  # stages try an OSError again later


def test_a_refused_connection_means_that_the_endpoint_is_down():
    with chat_server(echo) as server:
        pass
    with pytest.raises(EndpointDown, match="in 2 attempts"):
        judge_at(server.url, retries=1).answer(questions(2))


def test_a_judge_works_again_when_its_endpoint_is_up_again():
    state = SimpleNamespace(is_up=False)
    with chat_server(lambda asked, before: echo(asked, before) if state.is_up else Reply(reset=True)) as server:
        judge = judge_at(server.url, retries=1)
        with pytest.raises(EndpointDown):
            judge.answer(questions(3))
        state.is_up = True
        assert [answer.error for answer in judge.answer(questions(3))] == [None] * 3


def test_a_question_that_the_server_cannot_answer_fails_alone():
    def poisoned(asked, before):
        return Reply(status=500) if asked.text == "question 1" else echo(asked, before)

    with chat_server(poisoned) as server:
        answers = judge_at(server.url, retries=2).answer(questions(4))
    assert [answer.text is None for answer in answers] == [False, True, False, False]
    assert "500" in answers[1].error


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_a_refused_request_is_raised_without_retries(status):
    reply = Reply(status=status, body=b'{"error": "no such model"}')
    with (
        chat_server(lambda asked, before: reply) as server,
        pytest.raises(WorkerFailed, match=rf"rejected a request with {status} .*no such model"),
    ):
        judge_at(server.url, concurrency=2).answer(questions(50))
    assert len(server.asked) <= 4


def test_a_redirect_is_refused():
    with chat_server(echo) as other:
        away = Reply(status=307, headers={"Location": f"{other.url}/chat/completions"})
        with (
            chat_server(lambda asked, before: away) as server,
            pytest.raises(WorkerFailed, match=r"307 .*redirects .*base_url"),
        ):
            judge_at(server.url).answer(questions(1))
    assert other.asked == []


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(body=b"<html>busy</html>"), "no chat completion"),
        (Reply(body=b""), "no chat completion"),
        (Reply(body=b'{"choices": []}'), "choices"),
        (Reply(body=b'{"object": "error"}'), "choices"),
        (Reply(body=b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'), "no chat completion"),
        (Reply(body=b"[" * 100_000), "no chat completion"),
        (reply_with(""), "empty"),
        (Reply(body=b'{"choices": [{"message": {"content": null}}]}'), "empty"),
        (Reply(body=b'{"choices": [{"message": {"content": 7}}]}'), "content"),
        (reply_with("x" * (5 << 20)), "longer than"),
        (Reply(status=400, body=b"too long for this model"), "too long for this model"),
    ],
)
def test_a_reply_without_an_answer_is_an_error_and_never_a_value(reply, error):
    answer, requests = ask_once(reply)
    assert (answer.text, answer.probabilities) == (None, None)
    assert error in answer.error
    assert "\n" not in answer.error
    assert len(requests) == 1


def test_half_a_surrogate_pair_in_an_answer_is_replaced():
    answer, _ = ask_once(Reply(body=b'{"choices": [{"message": {"content": "yes \\ud800"}}]}'))
    assert (answer.text, answer.error) == ("yes \N{REPLACEMENT CHARACTER}", None)


def test_an_unfinished_answer_is_reported_as_an_error_with_its_text():
    answer, _ = ask_once(reply_with("score: 1", finish_reason="length"))
    assert answer.text == "score: 1"  # the first digit of 10, perhaps
    assert "not finished" in answer.error


def test_a_long_answer_is_read_in_full():
    assert ask_once(reply_with("x" * (1 << 20)))[0].text == "x" * (1 << 20)


def test_a_logprob_verdict_reads_the_likely_first_tokens():
    reply = with_top_logprobs("Yes", **{" Yes": -0.5, "yes": -2.0, "no": -3.0})
    answer, [request] = ask_once(reply, verdict=LogprobVerdict())
    assert (request.body["logprobs"], request.body["top_logprobs"], request.body["max_tokens"]) == (True, 20, 1)
    assert answer.probabilities == pytest.approx({"yes": 0.741866, "no": 0.049787}, abs=1e-6)  # e^-0.5 + e^-2, e^-3


SHARE = 0.367879  # e^-1


@pytest.mark.parametrize(
    ("no", "probabilities"),
    [
        ("tough", {"true": 2 * SHARE, "tough": 0}),  # `t` begins both answers
        ("false", {"true": 1, "false": SHARE}),  # three shares are more than 1
    ],
)
def test_a_token_counts_for_the_only_answer_that_it_begins(no, probabilities):
    reply = with_top_logprobs("t", **dict.fromkeys((" Tr", "true", "t", "f", "falsely", " "), -1.0))
    answer, _ = ask_once(reply, verdict=LogprobVerdict(yes="true", no=no))
    assert answer.probabilities == pytest.approx(probabilities, abs=1e-5)


@pytest.mark.parametrize("logprob", ["NaN", "Infinity", "3.5", '"-1"', "null"])
def test_an_invalid_log_prob_is_an_error(logprob):
    body = '{"choices": [{"message": {"content": "yes"}, "logprobs": {"content": [{"top_logprobs": [%s]}]}}]}'
    reply = Reply(body=(body % f'{{"token": "yes", "logprob": {logprob}}}').encode())
    answer, _ = ask_once(reply, verdict=LogprobVerdict())
    assert (answer.probabilities, "logprob" in answer.error) == (None, True)


def test_a_verdict_is_an_error_if_neither_choice_is_among_the_likely_tokens():
    answer, _ = ask_once(with_top_logprobs("maybe", maybe=-0.1), verdict=LogprobVerdict())
    assert answer.probabilities is None
    assert "among the likely first tokens" in answer.error


def test_a_constrained_choice_is_requested_from_vllm_and_refused_elsewhere():
    answer, [request] = ask_once(reply_with("no"), verdict=ChoiceVerdict(), guided="vllm")
    assert request.body["structured_outputs"] == {"choice": ["yes", "no"]}
    assert answer.text == "no"
    with pytest.raises(BadInput, match="constrained"):
        judge_at("http://127.0.0.1:1/v1", verdict=ChoiceVerdict())


@pytest.mark.parametrize(
    "spell",
    [
        str,
        lambda key: "".join(rf"\u{ord(each):04x}" for each in key),
        lambda key: base64.b64encode(key.encode()).decode(),
    ],
    ids=["plain", "escaped", "base64"],
)
def test_the_key_is_sent_and_appears_nowhere_else(monkeypatch, caplog, capfd, spell):
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    caplog.set_level(logging.DEBUG)
    repeats = Reply(status=403, body=f'{{"error": "the key {spell(CANARY)} is not known"}}'.encode())
    replies = {"question 0": echo, "question 1": lambda asked, before: Reply(status=400, body=repeats.body)}
    with chat_server(lambda asked, before: replies.get(asked.text, lambda *_: repeats)(asked, before)) as server:
        judge = judge_at(server.url, api_key_variable="JUDGE_KEY")
        answers = judge.answer(questions(2))
        with pytest.raises(WorkerFailed) as caught:
            judge.answer(questions(3)[2:])
    assert server.asked[0].headers["Authorization"] == f"Bearer {CANARY}"
    notes = getattr(caught.value, "__notes__", ())
    shown = "".join([caplog.text, *capfd.readouterr(), repr(answers), repr(caught.value), *notes])
    assert CANARY not in shown and spell(CANARY) not in shown
    assert re.search(r"the key \*{3}.{0,3} is not known", str(caught.value))


@pytest.mark.parametrize("key", ["", f"{CANARY} and more", f"{CANARY}\nX-Other: 1", f"{CANARY}é"])
def test_a_key_that_cannot_be_sent_is_refused_without_repeating_the_key(monkeypatch, key):
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
        judge_at(server.url).answer(questions(1))
    assert (len(server.asked), len(proxy.asked)) == (1, 0)
    assert "Authorization" not in server.asked[0].headers
