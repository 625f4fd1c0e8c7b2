"""Teachers score the policy's own tokens: from a directory exactly as the policy would, or over HTTP from a server."""

import math
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.errors import BadInput, EndpointDown, WorkerFailed
from models.config.teachers import TeacherDirectory
from models.data.problems import load_problems
from models.inspection.companions import check_teacher
from models.modeling.layout import lay_out
from models.modeling.policy import build_scratch, save_policy
from models.records.model_input import ModelInput
from models.text.tokenizer import scratch_tokenizer
from models.training.auxiliary import ask_endpoint, ask_model
from models.training.trainer import frozen_forward
from models.training.versions import load_teacher
from tests.support.chat_server import Reply
from tests.support.teachers import by_hand, teacher_at, teacher_server
from tests.support.training import DATA, TINY


def directory_of(path: Path, *, policy=TINY, seed=0, data=DATA, ends_with=None) -> Path:
    tokenizer = scratch_tokenizer(policy, load_problems(data, "train", 0))
    model = build_scratch(policy, tokenizer, seed=seed)
    if ends_with is not None:
        tokenizer.eos_token = ends_with
    save_policy(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return directory_of(tmp_path_factory.mktemp("teacher"), seed=7)


def tokenizer_of(policy=TINY, data=DATA):
    return scratch_tokenizer(policy, load_problems(data, "train", 0))


def passes(counts=((3, 5), (4, 1), (2, 9), (6, 0), (1, 2)), *, rows=2):
    """Sequences of so many prompt and completion tokens, laid out two by two; the last pass is empty."""
    rng = np.random.default_rng(1)
    inputs = []
    for prompt, completion in counts:
        tokens = rng.integers(2, 300, prompt + completion)
        inputs.append(ModelInput.given(tokens[:prompt]).continued(tokens[prompt:]))
    parts = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
    return inputs, [lay_out(part) for part in [*parts, []]]


def held(directory: Path, *, temperature: float = 0.7):
    teacher = load_teacher(directory, dtype="float32", temperature=temperature, device=torch.device("cpu"))
    return ask_model(partial(frozen_forward, teacher), lambda: None)


def asked(directory: Path, url: str, on_progress=lambda: None, **changes):
    return ask_endpoint(teacher_at(url, **changes), directory=directory, on_progress=on_progress)


# ---- a directory
def test_a_directory_scores_tokens_as_the_whole_model_does_at_the_policys_temperature(directory):
    sequences, batches = passes()
    found = held(directory)(batches)
    assert [len(part) for part in found] == [len(batch.targets_N) for batch in batches]
    np.testing.assert_allclose(np.concatenate(found), by_hand(directory, sequences, temperature=0.7), rtol=1e-4)


# ---- an endpoint
def test_an_endpoint_scores_tokens_as_the_model_behind_it_does(directory):
    sequences, batches = passes()
    with teacher_server(directory) as server:
        found = asked(directory, server.url)(batches)
    assert [len(part) for part in found] == [len(batch.targets_N) for batch in batches]
    np.testing.assert_allclose(np.concatenate(found), by_hand(directory, sequences, temperature=1.0), rtol=1e-4)
    assert len(server.asked) == 4  # one sequence of five has no completion token


def test_an_endpoint_is_asked_with_token_ids_and_without_tempering(directory):
    only = ModelInput.given([5, 6]).continued([7, 8])
    with teacher_server(directory) as server:
        asked(directory, server.url)([lay_out([only])])
    [request] = server.asked
    assert request.path == "/v1/completions"
    assert request.body == {
        "model": "teacher",
        "prompt": [5, 6, 7, 8],
        "prompt_logprobs": 1,
        "max_tokens": 1,
        "temperature": 1,
        "top_p": 1,
        "top_k": -1,
        "repetition_penalty": 1,
    }


def test_an_endpoint_is_asked_about_several_sequences_at_once(directory):
    beats, four = [], threading.Barrier(4)
    _, batches = passes(((2, 3),) * 12)

    def faults(request, before):
        four.wait(timeout=30)  # none is answered before four are asked

    with teacher_server(directory, faults=faults) as server:
        asked(directory, server.url, concurrency=4, on_progress=lambda: beats.append(1))(batches)
    assert server.most_at_once == 4
    assert len(beats) == 12


def test_an_endpoint_is_asked_again_after_faults_that_pass(directory):
    _, batches = passes(((2, 3),) * 12)
    faulty = [Reply(status=500), Reply(status=503), Reply(reset=True), Reply(body=b"{}", seconds=2), None]

    def faults(request, before):
        return faulty[request.body["prompt"][0] % 5] if before == 0 else None

    with teacher_server(directory, faults=faults) as server:
        found = asked(directory, server.url, timeout_seconds=1)(batches)
        asked_first = len(server.asked)
        calm = asked(directory, server.url)(batches)
    assert asked_first > 12
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(calm))


def test_an_endpoint_that_stays_down_is_a_named_error(directory):
    _, batches = passes()
    with (
        teacher_server(directory, faults=lambda request, before: Reply(status=503)) as server,
        pytest.raises(EndpointDown, match=r"/v1/completions is down: it answers 503 .* at attempt 3 of 3"),
    ):
        asked(directory, server.url, retries=2)(batches)


def position(number, value):
    def alter(answer):
        answer["choices"][0]["prompt_logprobs"][number] = value

    return alter


def every_candidate(**changes):
    def alter(answer):
        for candidates in answer["choices"][0]["prompt_logprobs"][1:]:
            for candidate in candidates.values():
                candidate.update(changes)

    return alter


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda answer: answer["choices"][0]["prompt_logprobs"].pop(), "expected log-probs at 4 positions, found 3"),
        (lambda answer: answer["choices"][0]["prompt_logprobs"].append(None), "at 4 positions, found 5"),
        (position(3, None), "position 3: expected the log-prob of token 8, found none"),
        (position(3, {"9": {"logprob": -1}}), "position 3: expected the log-prob of token 8, found those of 9"),
        (position(2, {}), "position 2: expected the log-prob of token 7, found those of no token"),
        (position(2, {"7": {"logprob": None}}), "prompt_logprobs.2.7.logprob: Input should be a valid number"),
        (every_candidate(logprob=-9999.0), "logprob: Input should be greater than -9999"),
        (every_candidate(logprob=math.nan), "logprob: Input should be"),
        (every_candidate(logprob=1.5), "logprob: Input should be less than or equal to 0.01"),
        (every_candidate(logprob="-1"), "logprob: Input should be a valid number"),
        (every_candidate(decoded_token="zebra"), "for the policy and 'zebra' there: another tokenizer"),
        (lambda answer: answer["choices"][0].pop("prompt_logprobs"), "prompt_logprobs: Field required"),
        (lambda answer: answer["choices"][0].update(prompt_logprobs=None), "prompt_logprobs: Input should be"),
        (lambda answer: answer["choices"].clear(), "choices: Tuple should have at least 1 item"),
        (lambda answer: answer.clear(), "choices: Field required"),
    ],
)
def test_whatever_an_endpoint_leaves_out_is_an_error_and_never_a_log_prob(directory, alter, reason):
    only = ModelInput.given([5, 6]).continued([7, 8])
    with (
        teacher_server(directory, alter=alter) as server,
        pytest.raises(WorkerFailed, match=r"teacher at endpoint http.*of a text of 4 tokens, 2 of them") as caught,
    ):
        asked(directory, server.url)([lay_out([only])])
    assert reason in str(caught.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=400, body=b'{"message": "maximum context length is 4"}'), "400 Bad Request.*context length is 4"),
        (Reply(status=404, body=b"no such model"), "404 Not Found: no such model"),
        (Reply(body=b"<html>busy</html>"), "no log-probs of its prompt: body"),
    ],
)
def test_a_refusal_ends_the_work_with_its_reason(directory, reply, reason):
    _, batches = passes()
    with (
        teacher_server(directory, faults=lambda request, before: reply) as server,
        pytest.raises(WorkerFailed, match=reason),
    ):
        asked(directory, server.url, concurrency=1)(batches)
    assert len(server.asked) == 1


def test_what_the_server_says_of_the_prompt_is_not_looked_at(directory):
    only = ModelInput.given([5, 6, 7]).continued([8])
    with teacher_server(directory, alter=position(1, None)) as server:
        [found] = asked(directory, server.url)([lay_out([only])])
    assert len(found) == 1


# ---- what is refused before a run
def test_a_teacher_with_the_policys_tokenizer_is_accepted_and_counted(directory):
    parameters = check_teacher(TeacherDirectory(path=directory), tokenizer_of(), longest_tokens=TINY.context)
    assert parameters == AutoModelForCausalLM.from_pretrained(directory).num_parameters()


def test_a_teacher_that_numbers_its_tokens_otherwise_is_refused(tmp_path):
    other = directory_of(tmp_path, data=DATA.model_copy(update={"operations": 2}), policy=TINY)
    with pytest.raises(BadInput, match=r"teacher .*its tokenizer is not the policy's: expected token '.*' as number"):
        check_teacher(TeacherDirectory(path=other), tokenizer_of(), longest_tokens=8)


def test_a_teacher_with_fewer_tokens_is_refused_and_one_with_more_is_not(tmp_path):
    fewer = TINY.model_copy(update={"vocab_size": 320})
    with pytest.raises(BadInput, match=r"as number \d+, found no such token"):
        check_teacher(
            TeacherDirectory(path=directory_of(tmp_path / "a", policy=fewer)), tokenizer_of(), longest_tokens=8
        )
    whole = TeacherDirectory(path=directory_of(tmp_path / "b"))
    assert check_teacher(whole, tokenizer_of(policy=fewer), longest_tokens=8) > 0


def test_a_teacher_that_ends_with_another_token_is_refused(tmp_path):
    other = TeacherDirectory(path=directory_of(tmp_path, ends_with="."))
    with pytest.raises(BadInput, match=r"it ends with '\.', expected the policy's '<\|eos\|>'"):
        check_teacher(other, tokenizer_of(), longest_tokens=8)


def test_a_teacher_with_too_short_a_context_is_refused(directory):
    with pytest.raises(BadInput, match=r"its context is 256 tokens, expected at least 257"):
        check_teacher(TeacherDirectory(path=directory), tokenizer_of(), longest_tokens=257)


def test_a_directory_that_is_no_model_is_refused_as_the_teacher(tmp_path):
    with pytest.raises(BadInput, match=r"algorithm\.distillation\.teacher: policy .*no config\.json"):
        check_teacher(TeacherDirectory(path=tmp_path), tokenizer_of(), longest_tokens=8)


def test_an_endpoint_is_checked_without_being_asked():
    assert check_teacher(teacher_at("http://127.0.0.1:1/v1"), tokenizer_of(), longest_tokens=8) == 0
    with pytest.raises(BadInput, match="not in allowed_hosts"):
        check_teacher(teacher_at("http://127.0.0.2:1/v1"), tokenizer_of(), longest_tokens=8)
