"""A policy behind the door with Rheostat's own engine: recorded tokens, repeatable answers, and the command."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import httpx
import psutil
import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.errors import BadInput
from rheostat.models.agents.server import PolicyDoor
from rheostat.models.config.policy_server import PolicyServer, ServerSampling
from rheostat.models.engines.local import loaded_policy
from rheostat.models.records.model_input import ModelInput
from tests.support.doors import user
from tests.support.jobs import ROOT
from tests.support.policies import write_chat_policy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    write_chat_policy(path, "qwen-2.5", likely={"<|im_end|>": 0.1})
    return path


@pytest.fixture(scope="module")
def served(directory):
    config = PolicyServer(sampling=ServerSampling(max_new_tokens=24), parser="hermes", seed=1)
    with closing(PolicyDoor(config, directory, port=0, key="key")) as served:
        yield served


@pytest.fixture
def no_program(monkeypatch):
    """Fail if the command starts the program of the server, which would replace the process of the tests."""
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the server was started"))


def chat(served, *messages, **fields):
    headers = {"authorization": f"Bearer {served.key}"}
    url = f"{served.door.url}/chat/completions"
    with httpx.Client(trust_env=False, timeout=60, headers=headers) as client:
        answer = client.post(url, json={"messages": [*messages], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_recorded_logprobs_are_those_of_a_forward_pass_over_the_recorded_context(served):
    served.forget()
    first = chat(served, user("Hello."), return_token_ids=True)
    chat(served, user("Hello."), first["message"], user("More."))
    record = served._episode.record
    [[turn, following]] = record.branches()
    assert (list(turn.tokens), following.parent) == (first["token_ids"], turn.number)
    for each in (turn, following):
        prompt = ModelInput.from_prompt(record.context_of(each.number))
        [[total]] = served._engine.score_continuations([prompt], [each.tokens])
        assert total == pytest.approx(sum(each.logprobs), abs=1e-3)


def test_a_server_with_a_seed_repeats_its_answers_but_equal_requests_differ(served):
    def tokens():
        return [chat(served, user("Hello."), return_token_ids=True)["token_ids"] for _ in range(3)]

    served.forget()
    before = tokens()
    served.forget()
    assert tokens() == before
    assert len({*map(tuple, before)}) > 1


def test_concurrent_requests_are_all_answered(served):
    served.forget()
    answers = []
    threads = [threading.Thread(target=lambda n=n: answers.append(chat(served, user(f"Hello {n}.")))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 6
    assert len(served._episode.record.branches()) == 6


def post(served, **fields):
    headers = {"authorization": f"Bearer {served.key}"}
    with httpx.Client(trust_env=False, timeout=60, headers=headers) as client:
        return client.post(f"{served.door.url}/completions", json=fields)


def complete(served, **fields):
    answer = post(served, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.fixture
def prompts(served):
    """Two prompts with a continuation each, as lists of tokens."""
    tokenizer = served._engine._policy.tokenizer
    return [tokenizer(text)["input_ids"] for text in ("1 + 1 = 2", "Ana has three apples and a pear")]


@pytest.mark.parametrize("elements", [loaded_policy.MAX_ELEMENTS, 1], ids=["whole", "one by one"])
def test_echoed_logprobs_are_those_of_the_continuation(served, prompts, elements, monkeypatch):
    """The requests are those of lm-eval, and so is the reading of their answers."""
    monkeypatch.setattr(loaded_policy, "MAX_ELEMENTS", elements)
    served.forget()
    words = [[token] for token in range(served._engine._policy.model.config.vocab_size)]
    fields = {"model": "policy", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for prompt, choice in zip(prompts, complete(served, prompt=prompts, **fields), strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(prompt) + 1
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        for split in range(1, len(prompt)):
            context = ModelInput.from_prompt(prompt[:split])
            [[total]] = served._engine.score_continuations([context], [prompt[split:]])
            [others] = served._engine.score_continuations([context], words)
            assert sum(found["token_logprobs"][split:-1]) == pytest.approx(total, abs=1e-4)
            assert max(found["top_logprobs"][split].values()) == pytest.approx(max(others), abs=1e-4)
            is_greedy = found["token_logprobs"][split] == max(found["top_logprobs"][split].values())
            assert is_greedy == (others[prompt[split]] == max(others))


def test_logprobs_without_echo_are_those_of_the_sampled_tokens(served, prompts):
    served.forget()
    [choice] = complete(served, prompt=prompts[1], max_tokens=4, logprobs=3, return_token_ids=True)
    [[total]] = served._engine.score_continuations([ModelInput.from_prompt(prompts[1])], [choice["token_ids"]])
    assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(total, abs=1e-4)
    # Tokens with the same text are one entry.
    assert {len(each) for each in choice["logprobs"]["top_logprobs"]} <= {1, 2, 3, 4}


def test_a_scored_sequence_leaves_room_for_one_more_token(served):
    served.forget()
    prompt = [5] * (served._limits.context - 2)
    [choice] = complete(served, prompt=prompt, max_tokens=4, logprobs=1)
    assert len(choice["logprobs"]["tokens"]) == 1
    complete(served, prompt=[*prompt, 5], max_tokens=0, logprobs=1, echo=True)
    assert post(served, prompt=[*prompt, 5, 5], max_tokens=0, logprobs=1, echo=True).status_code == 400


def test_logprobs_of_prompts_are_computed_while_others_are_decoded(served, prompts):
    served.forget()
    expected = complete(served, prompt=prompts, max_tokens=0, logprobs=2, echo=True)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(chat(served, user("Hello.")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    scored = [complete(served, prompt=prompts, max_tokens=0, logprobs=2, echo=True) for _ in range(3)]
    for thread in threads:
        thread.join(60)
    assert scored == [expected] * 3
    assert len(answers) == len(served._episode.record.branches()) == 3


def test_a_port_in_use_is_refused(served, directory):
    with pytest.raises(BadInput, match="Choose another port"):
        PolicyDoor(PolicyServer(), directory, port=served.door.port, key="key")


def test_an_unknown_parser_is_refused(directory):
    with pytest.raises(BadInput, match=r"^parser is 'hermess', but it must be auto"):
        PolicyDoor(PolicyServer(parser="hermess"), directory, port=0, key="key")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sampling.temperature=11"], "sampling.temperature"),
        (["history=none"], "history"),
        (["engine.kind=vllm"], "engine.kind"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(words, message, directory, capsys, no_program):
    assert main(["engine", "serve-policy", str(directory), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_directory_is_refused(tmp_path, capsys, no_program):
    assert main(["engine", "serve-policy", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.system
def test_the_command_serves_until_it_is_interrupted_and_does_not_wait_for_turns(tmp_path):
    """The turns of the open request are long. An abort of the process would be code -6."""
    directory = tmp_path / "policy"
    write_chat_policy(directory, "qwen-2.5", likely={"<|im_end|>": 1e-6})
    command = [sys.executable, "-m", "rheostat", "engine", "serve-policy", str(directory), "parser=hermes"]
    environment = {**os.environ, "RHEOSTAT_SERVE_KEY": "secret"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            lines = [server.stdout.readline().strip() for _ in range(3)]
            url = lines[1].removeprefix("export OPENAI_BASE_URL=")
            assert lines[2] == "export OPENAI_API_KEY=$RHEOSTAT_SERVE_KEY"
            headers = {"authorization": "Bearer secret"}
            with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=None) as client:
                assert client.get("/models").status_code == 200
                request = {"prompt": [[5, 6]] * 64, "max_tokens": 1000}
                answers = []
                thread = threading.Thread(target=lambda: answers.append(client.post("/completions", json=request)))
                before = cpu_seconds(server)
                thread.start()
                while cpu_seconds(server) < before + 0.3:  # the turns are sampled
                    time.sleep(0.05)
                server.send_signal(signal.SIGINT)
                thread.join()
            assert answers[0].status_code == 409
            assert server.wait() == 0
        finally:
            server.kill()


def cpu_seconds(server):
    return sum(psutil.Process(server.pid).cpu_times()[:2])
