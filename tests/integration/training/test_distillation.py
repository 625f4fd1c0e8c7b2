"""Distillation: how teachers score tokens, from a directory or behind an endpoint, and the advantages that follow."""

import json
import math
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from rheostat.infra.errors import BadInput, EndpointDown, WorkerFailed
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import DistillationOnly, Grpo
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.teachers import Distillation, Specialist, TeacherDirectory
from rheostat.models.data.problems import load_problems
from rheostat.models.inspection.other_models import check_teacher
from rheostat.models.modeling.layout import lay_out
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import EstimateWork
from rheostat.models.text.tokenizer import load_tokenizer, scratch_tokenizer
from rheostat.models.training.auxiliary import build_endpoint_forward, build_model_forward
from rheostat.models.training.frozen import load_frozen_policy
from rheostat.models.training.ranks import Ranks
from tests.support.chat_server import Reply
from tests.support.distillation import HELD, credit, estimate_work, give_credit, rows_of, sequences_of
from tests.support.policies import write_scratch
from tests.support.processes import preload
from tests.support.teachers import compute_logprobs, teacher_at, teacher_server
from tests.support.training import DATA, TINY, publish_scratch
from tests.support.update_workers import Job, change, run_on_ranks, start_worker

preload(__name__)

ALONE = DistillationOnly(distillation=HELD)
start = partial(start_worker, algorithm=ALONE)
MICROBATCHES = UpdateConfig(microbatch_tokens=90)


@pytest.fixture
def student(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "student"))


@pytest.fixture
def teacher(uri: str) -> ModelVersion:
    bigger = TINY.model_copy(update={"hidden_size": 48, "intermediate_size": 64})
    return publish_scratch(f"{uri}/run", Path(uri, "teacher"), policy=bigger, seed=5)


def columns(uri: str, shards: tuple[ShardRef, ...], *names: str) -> list[np.ndarray]:
    """Return columns of estimates, all completions concatenated."""
    tables = [read_shard(open_store(f"{uri}/run"), shard) for shard in shards]
    return [np.concatenate([np.concatenate(table[name].to_pylist()) for table in tables]) for name in names]


def advantages(samples: pa.Table) -> np.ndarray:
    return np.concatenate(samples["advantages"].to_pylist())


# ---- a teacher that is the student


@pytest.mark.parametrize(
    "update",
    [
        MICROBATCHES,
        change(MICROBATCHES, zero_stage=3),
        change(MICROBATCHES, zero_stage=2, dtype="bfloat16"),
    ],
    ids=["float32", "zero3", "bfloat16"],
)
def test_a_teacher_that_is_the_student_gives_advantages_of_exactly_zero(uri, student, update):
    work = estimate_work(uri, student, student)
    estimates = start(uri, update).estimate(work).shards
    policy, said = columns(uri, estimates, "policy", "teacher")
    assert len(policy) > 100
    assert np.all(policy < 0)
    np.testing.assert_array_equal(policy, said)
    found = advantages(credit(uri, work, estimates, ALONE))
    assert len(found) == len(policy)
    assert not found.any()


# ---- a teacher that knows better


def test_the_advantage_of_a_token_is_the_teachers_log_prob_minus_the_students(uri, student, teacher):
    work = estimate_work(uri, student, teacher)
    found = advantages(credit(uri, work, start(uri, MICROBATCHES).estimate(work).shards, ALONE))
    sequences = sequences_of(uri, work)
    said, own = (compute_logprobs(Path(uri, name), sequences, temperature=0.9) for name in ("teacher", "student"))
    np.testing.assert_allclose(found, np.array(said) - np.array(own), atol=2e-5)


def test_the_teachers_advantage_is_scaled_by_its_coefficient_and_added_to_that_of_rewards(uri, student, teacher):
    work = estimate_work(uri, student, teacher)
    half = HELD.model_copy(update={"coefficient": 0.5})
    estimates = start(uri, MICROBATCHES, algorithm=Grpo(distillation=half)).estimate(work).shards
    policy, said = columns(uri, estimates, "policy", "teacher")
    both = advantages(credit(uri, work, estimates, Grpo(distillation=half)))
    rewards = advantages(credit(uri, work, (), Grpo()))
    np.testing.assert_allclose(both, rewards + 0.5 * (said - policy), atol=1e-5)
    told = give_credit(uri, work, estimates, Grpo(distillation=half)).metrics["teacher_kl"]
    assert told == pytest.approx(np.mean(policy - said), abs=1e-5)
    assert np.abs(rewards).min() > 0.1


def test_groups_without_a_reward_signal_are_trained_on_by_the_teacher_alone(uri, student, teacher):
    work = estimate_work(uri, student, teacher, rewards=(1.0, 1.0))
    estimates = start(uri, MICROBATCHES).estimate(work).shards
    policy, said = columns(uri, estimates, "policy", "teacher")
    for algorithm in (ALONE, Grpo(distillation=HELD)):
        np.testing.assert_allclose(advantages(credit(uri, work, estimates, algorithm)), said - policy, atol=1e-6)
    assert credit(uri, work, (), Grpo()).num_rows == 0


# ---- a teacher elsewhere


def elsewhere(url: str, **changes) -> DistillationOnly:
    return DistillationOnly(distillation=Distillation(teacher=teacher_at(url, **changes)))


def test_attempts_to_reach_an_endpoint_count_as_progress_and_a_dead_endpoint_is_named(uri, student):
    work = estimate_work(uri, student, None)
    with teacher_server(Path(uri, "student"), faults=lambda asked, before: Reply(status=503)) as server:
        worker = start(uri, MICROBATCHES, algorithm=elsewhere(server.url, retries=2))
        with pytest.raises(EndpointDown, match=r"/v1/completions .* in 3 attempts.* 503"):
            worker.estimate(work)
    assert worker.progress() > 5  # passes of the policy, and attempts
    assert len(server.asked) >= 3


def test_work_without_the_teachers_model_is_refused(uri, student):
    with pytest.raises(BadInput, match="does not name the teacher"):
        start(uri, MICROBATCHES).estimate(estimate_work(uri, student, None))


# ---- several teachers
def specialists(*more: Specialist, first=HELD.teacher) -> DistillationOnly:
    other = Specialist(column="kind", values=("fractions", "decimals"), teacher=first)
    own = Specialist(column="kind", values=("3",), teacher=HELD.teacher)
    return DistillationOnly(distillation=HELD.model_copy(update={"specialists": (other, own, *more)}))


def routed_work(uri: str, general: ModelVersion, *versions: ModelVersion | None) -> EstimateWork:
    """Return a work unit with six prompts: the first specialist selects prompts 1 and 5, the second prompt 4."""
    kinds = ({"kind": "sums"}, {"kind": "decimals"}, {}, {"kind": None}, {"kind": 3}, {"kind": "fractions"})
    rows = [{"prompt_id": str(row), "columns": json.dumps(columns)} for row, columns in enumerate(kinds)]
    table = pa.Table.from_pylist(rows, PROMPT_SCHEMA)
    prompts = write_shard(open_store(f"{uri}/run"), table, kind="prompts", metadata={})
    return replace(estimate_work(uri, general, general), specialists=versions, prompts=prompts)


def test_each_problem_has_the_log_probs_of_the_first_specialist_that_selects_it(uri, student, teacher):
    third = publish_scratch(f"{uri}/run", Path(uri, "third"), seed=9)
    work = routed_work(uri, student, teacher, third)
    late = Specialist(column="kind", values=("decimals", "3"), teacher=HELD.teacher)
    work = replace(work, specialists=(teacher, third, student))
    rows = rows_of(uri, start(uri, MICROBATCHES, algorithm=specialists(late)).estimate(work).shards)
    names = ["student", "teacher", "student", "student", "third", "teacher"]
    assert [row["prompt_row"] for row in rows] == [prompt for prompt in range(6) for _ in range(3)]
    for row, sequence in zip(rows, sequences_of(uri, work), strict=True):
        name = names[row["prompt_row"]]
        expected = compute_logprobs(Path(uri, name), [sequence], temperature=0.9)
        np.testing.assert_allclose(row["teacher"], expected, atol=2e-5)
        if name == "student":  # the policy and each teacher compute the same micro-batches
            assert row["teacher"] == row["policy"]
        else:
            assert row["teacher"] != row["policy"]


def test_a_specialist_without_completions_is_not_loaded(uri, student, teacher):
    absent = replace(teacher, weights=change(teacher.weights, key="teachers/absent", digest="0" * 64))
    unused = Specialist(column="level", values=("hard",), teacher=HELD.teacher)
    work = replace(routed_work(uri, student), specialists=(teacher, student, absent))
    start(uri, MICROBATCHES, algorithm=specialists(unused)).estimate(work)
    everything = Specialist(column="kind", values=("sums",), teacher=HELD.teacher)
    with pytest.raises(Exception, match="absent"):
        start(uri, MICROBATCHES, algorithm=specialists(everything)).estimate(work)


def test_an_endpoint_receives_only_the_completions_of_its_problems(uri, student, teacher):
    work = replace(routed_work(uri, student, None, student))
    with teacher_server(Path(uri, "teacher")) as server:
        algorithm = specialists(first=teacher_at(server.url))
        rows = rows_of(uri, start(uri, MICROBATCHES, algorithm=algorithm).estimate(work).shards)
    sequences = [each for row, each in zip(rows, sequences_of(uri, work), strict=True) if row["prompt_row"] in (1, 5)]
    assert sorted(request.body["prompt"] for request in server.asked) == sorted(
        each.tokens.tolist() for each in sequences
    )


def test_work_without_the_prompts_of_specialists_is_refused(uri, student, teacher):
    work = replace(routed_work(uri, student, teacher, student), prompts=None)
    with pytest.raises(BadInput, match="2 specialists"):
        start(uri, MICROBATCHES, algorithm=specialists()).estimate(work)


@pytest.mark.system
def test_two_ranks_agree_with_one_if_a_specialist_has_fewer_completions_than_ranks(uri, student, teacher):
    work = routed_work(uri, student, teacher, student)
    first, *_ = work.shards
    work = replace(work, shards=(replace(first, rows=(1,)), *work.shards[1:]))
    jobs = {
        name: Job(config, [work], algorithm=specialists())
        for name, config in (
            ("whole", MICROBATCHES),
            ("sharded", change(MICROBATCHES, zero_stage=3)),
            ("sequence parallel", change(MICROBATCHES, sequence_parallel=2)),
        )
    }
    alone = columns(uri, start(uri, MICROBATCHES, algorithm=specialists()).estimate(work).shards, "policy", "teacher")
    for name, [outcome] in run_on_ranks(uri, jobs).items():
        np.testing.assert_allclose(columns(uri, outcome.shards, "policy", "teacher"), alone, atol=1e-5, err_msg=name)


# ---- several ranks


@pytest.mark.system
@pytest.mark.parametrize("slices", [1, 2])
def test_two_ranks_agree_with_one_for_every_teacher_and_request_each_sequence_once(uri, student, teacher, slices):
    work, config = estimate_work(uri, student, teacher), change(MICROBATCHES, sequence_parallel=slices)
    with teacher_server(Path(uri, "teacher")) as server:
        jobs = {
            "teacher": Job(config, [work], algorithm=ALONE),
            "student": Job(config, [replace(work, teacher=student)], algorithm=ALONE),
            "endpoint": Job(config, [replace(work, teacher=None)], algorithm=elsewhere(server.url)),
        }
        found = {name: outcome.shards for name, [outcome] in run_on_ranks(uri, jobs).items()}
    held, own, asked = (columns(uri, shards, "policy", "teacher") for shards in found.values())
    alone = start(uri, MICROBATCHES).estimate(work).shards
    np.testing.assert_allclose(held, columns(uri, alone, "policy", "teacher"), atol=1e-5)
    np.testing.assert_array_equal(own[0], own[1])
    sequences = sequences_of(uri, work)
    np.testing.assert_allclose(asked[1], compute_logprobs(Path(uri, "teacher"), sequences, temperature=1.0), atol=1e-4)
    prompts = [tuple(request.body["prompt"]) for request in server.asked]
    assert len(prompts) == len(set(prompts)) == len(sequences)


# ---- how a teacher scores tokens
@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_scratch(tmp_path_factory.mktemp("teacher"), TINY, seed=7)


def passes(counts=((3, 5), (4, 1), (2, 9), (6, 0), (1, 2)), *, rows=2):
    """Return sequences with these numbers of prompt and completion tokens, two per micro-batch.

    The last micro-batch is empty.
    """
    rng = np.random.default_rng(1)
    inputs = []
    for prompt, completion in counts:
        tokens = rng.integers(2, 300, prompt + completion)
        inputs.append(ModelInput.from_prompt(tokens[:prompt]).append_completion(tokens[prompt:]))
    parts = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
    return inputs, [lay_out(part) for part in [*parts, []]]


def held(directory: Path, *, temperature: float = 0.7):
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    teacher = load_frozen_policy(directory, UpdateConfig(), temperature=temperature, ranks=ranks)
    return build_model_forward(teacher.forward, lambda: None)


def query(directory: Path, url: str, on_progress=lambda: None, **changes):
    return build_endpoint_forward(teacher_at(url, **changes), directory=directory, on_progress=on_progress)


# ---- a directory
def test_a_directory_scores_tokens_as_the_whole_model_does_at_the_policys_temperature(directory):
    sequences, batches = passes()
    found = held(directory)(batches)
    assert [len(part) for part in found] == [len(batch.targets_N) for batch in batches]
    np.testing.assert_allclose(
        np.concatenate(found), compute_logprobs(directory, sequences, temperature=0.7), rtol=1e-4
    )


# ---- an endpoint
def test_an_endpoint_scores_tokens_as_the_model_behind_it_does(directory):
    sequences, batches = passes()
    with teacher_server(directory) as server:
        found = query(directory, server.url)(batches)
    assert [len(part) for part in found] == [len(batch.targets_N) for batch in batches]
    np.testing.assert_allclose(
        np.concatenate(found), compute_logprobs(directory, sequences, temperature=1.0), rtol=1e-4
    )
    assert len(server.asked) == 4  # one sequence of five has no completion token


def test_an_endpoint_receives_token_ids_and_no_sampling_settings(directory):
    only = ModelInput.from_prompt([5, 6]).append_completion([7, 8])
    with teacher_server(directory) as server:
        query(directory, server.url)([lay_out([only])])
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


def test_an_endpoint_receives_several_requests_at_once(directory):
    beats, four = [], threading.Barrier(4)
    _, batches = passes(((2, 3),) * 12)

    def faults(request, before):
        four.wait(timeout=240)  # none is answered before four are asked

    with teacher_server(directory, faults=faults) as server:
        query(directory, server.url, concurrency=4, on_progress=lambda: beats.append(1))(batches)
    assert server.most_at_once == 4
    assert len(beats) == 12


def test_requests_to_an_endpoint_are_repeated_after_temporary_faults(directory):
    _, batches = passes(((2, 3),) * 12)
    faulty = [Reply(status=500), Reply(status=503), Reply(reset=True), Reply(body=b"{}", seconds=2), None]

    def faults(request, before):
        return faulty[request.body["prompt"][0] % 5] if before == 0 else None

    with teacher_server(directory, faults=faults) as server:
        found = query(directory, server.url, timeout_seconds=1, retries=8)(batches)
        asked_first = len(server.asked)
        calm = query(directory, server.url)(batches)
    assert asked_first > 12
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(calm))


def test_an_endpoint_that_stays_down_is_a_named_error(directory):
    _, batches = passes()
    with (
        teacher_server(directory, faults=lambda request, before: Reply(status=503)) as server,
        pytest.raises(
            EndpointDown, match=r"/v1/completions did not answer a request in 3 attempts.* responded with 503"
        ),
    ):
        query(directory, server.url, retries=2)(batches)


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
        (
            lambda answer: answer["choices"][0]["prompt_logprobs"].pop(),
            "log-probs at 3 positions, but the text has 4 tokens",
        ),
        (
            lambda answer: answer["choices"][0]["prompt_logprobs"].append(None),
            "log-probs at 5 positions, but the text has 4 tokens",
        ),
        (position(3, None), "at position 3, the response must contain the log-prob of token 8, but it contains none"),
        (
            position(3, {"9": {"logprob": -1}}),
            "at position 3, the response must contain the log-prob of token 8, but it contains those of 9",
        ),
        (
            position(2, {}),
            "at position 2, the response must contain the log-prob of token 7, but it contains those of no token",
        ),
        (position(2, {"7": {"logprob": None}}), "prompt_logprobs.2.7.logprob: Input should be a valid number"),
        (every_candidate(logprob=-9999.0), "logprob: Input should be greater than -9999"),
        (every_candidate(logprob=math.nan), "logprob: Input should be"),
        (every_candidate(logprob=1.5), "logprob: Input should be less than or equal to 0.01"),
        (every_candidate(logprob="-1"), "logprob: Input should be a valid number"),
        (every_candidate(decoded_token="zebra"), "for the policy but 'zebra' for the teacher"),
        (lambda answer: answer["choices"][0].pop("prompt_logprobs"), "prompt_logprobs: Field required"),
        (lambda answer: answer["choices"][0].update(prompt_logprobs=None), "prompt_logprobs: Input should be"),
        (lambda answer: answer["choices"].clear(), "choices: Tuple should have at least 1 item"),
        (lambda answer: answer.clear(), "choices: Field required"),
    ],
)
def test_an_incomplete_answer_of_an_endpoint_is_an_error_and_never_a_log_prob(directory, alter, reason):
    only = ModelInput.from_prompt([5, 6]).append_completion([7, 8])
    with (
        teacher_server(directory, alter=alter) as server,
        pytest.raises(WorkerFailed, match=r"teacher at endpoint http.* 4 tokens \(2 of them") as caught,
    ):
        query(directory, server.url)([lay_out([only])])
    assert reason in str(caught.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=400, body=b'{"message": "maximum context length is 4"}'), "400 Bad Request.*context length is 4"),
        (Reply(status=404, body=b"no such model"), "404 Not Found: no such model"),
        (Reply(body=b"<html>busy</html>"), r"no valid prompt_logprobs \(body: Invalid JSON"),
    ],
)
def test_a_refused_request_ends_the_work_with_the_reason(directory, reply, reason):
    _, batches = passes()
    with (
        teacher_server(directory, faults=lambda request, before: reply) as server,
        pytest.raises(WorkerFailed, match=reason),
    ):
        query(directory, server.url, concurrency=1)(batches)
    assert len(server.asked) == 1


def test_log_probs_of_prompt_tokens_are_ignored(directory):
    only = ModelInput.from_prompt([5, 6, 7]).append_completion([8])
    with teacher_server(directory, alter=position(1, None)) as server:
        [found] = query(directory, server.url)([lay_out([only])])
    assert len(found) == 1


# ---- before a run
def test_a_teacher_with_the_policys_tokenizer_is_accepted_and_counted(directory, tmp_path):
    tokenizer, fewer = load_tokenizer(directory), TINY.model_copy(update={"vocab_size": 320})
    teacher = TeacherDirectory(path=directory)
    model = check_teacher(teacher, tokenizer, longest_tokens=TINY.context)
    assert model.parameters == AutoModelForCausalLM.from_pretrained(directory).num_parameters()
    first_tokens = load_tokenizer(write_scratch(tmp_path, fewer))  # the teacher may have more tokens than the policy
    assert check_teacher(teacher, first_tokens, longest_tokens=8) == model


def test_an_endpoint_is_checked_without_a_request():
    tokenizer = scratch_tokenizer(TINY, load_problems(DATA, "train", 0))
    assert check_teacher(teacher_at("http://127.0.0.1:1/v1"), tokenizer, longest_tokens=8) is None
