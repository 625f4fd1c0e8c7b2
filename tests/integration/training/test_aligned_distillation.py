"""Distillation from a teacher with another tokenizer: estimates of real models, and the advantages that follow."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import DistillationOnly
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.teachers import Distillation, TeacherDirectory
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import PROMPT_SCHEMA, score_schema
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import EstimateWork, ScoredShard
from rheostat.models.text.alignment import build_byte_decoder
from rheostat.models.text.tokenizer import load_tokenizer, train_tokenizer
from tests.support.distillation import HELD, SCORING, credit, rows_of, sequences_of
from tests.support.processes import preload
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.teachers import compute_logprobs
from tests.support.training import TINY, publish_scratch
from tests.support.update_workers import Job, change, run_on_ranks, start_worker

preload(__name__)

CONFIG = UpdateConfig(microbatch_tokens=150)
TEACHER = TeacherDirectory(path=Path("elsewhere"), align="text")
ALONE = DistillationOnly(distillation=Distillation(teacher=TEACHER))
PROMPTS = ("What is 3 + 4?", "Compute 12 - 5.")
TEXTS = ("The result is 7.", "It is 12, I think", "seven", "")


@pytest.fixture
def student(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "student"))


@pytest.fixture
def teacher(uri: str) -> ModelVersion:
    """Teacher whose tokenizer was trained on other texts than that of the student."""
    tokenizer, directory = train_tokenizer([*PROMPTS, *TEXTS], vocab_size=320, context=64), Path(uri, "teacher")
    save_policy(build_scratch(change(TINY, context=64), tokenizer, seed=8), tokenizer, directory)
    return ModelVersion(version=0, weights=publish_bundle(open_store(f"{uri}/run"), directory, prefix="teachers"))


def write_work(uri: str, student: ModelVersion, teacher: ModelVersion, *, chat: bool = False) -> EstimateWork:
    """Return a work unit with one completion of each text for each prompt, of which every second one has ended."""
    store, tokenizer, terms = open_store(f"{uri}/run"), load_tokenizer(Path(uri, "student")), SCORING.terms
    prompts, rollouts, scores = [], [], []
    for row, text in enumerate(PROMPTS):
        message = {"role": "user", "content": text, "name": None}
        prompts.append({"prompt_id": str(row), "text": text, "messages": [message] if chat else None})
        for sample, completion in enumerate(TEXTS):
            tokens = tokenizer(completion).input_ids + [tokenizer.eos_token_id] * (sample % 2)
            columns = {
                "prompt_tokens": tokenizer(text).input_ids,
                "completion_tokens": tokens,
                "logprobs": [-5.0] * len(tokens),
                "segments": [{"policy_version": 0, "tokens": len(tokens)}],
            }
            rollouts.append(rollout(row, sample, completion, **columns))
            scores.append({"prompt_row": row, "sample": sample, "reward": 1.0, f"reward_{terms[0]}": 1.0})
    scored = write_shard(store, pa.Table.from_pylist(scores, score_schema(terms)), kind="scores", metadata={})
    shard = write_shard(store, pa.Table.from_pylist(prompts, PROMPT_SCHEMA), kind="prompts", metadata={})
    shards = (ScoredShard(write_rollouts(store, *rollouts), scored),)
    return EstimateWork(iteration=1, shards=shards, policy=student, teacher=teacher, prompts=shard)


def read_texts(uri: str, prompts: list[str]) -> list[ModelInput]:
    """Return the texts of the work unit as sequences of the teacher."""
    tokenizer, sequences = load_tokenizer(Path(uri, "teacher")), []
    for prompt in prompts:
        for sample, completion in enumerate(TEXTS):
            tokens = tokenizer(completion).input_ids + [tokenizer.eos_token_id] * (sample % 2)
            sequences.append(ModelInput.from_prompt(tokenizer(prompt).input_ids).append_completion(tokens))
    return sequences


@pytest.mark.parametrize("chat", [False, True])
def test_the_advantages_of_a_completion_sum_to_the_log_ratio_of_its_text(uri, student, teacher, chat):
    work = write_work(uri, student, teacher, chat=chat)
    outcome = start_worker(uri, CONFIG, algorithm=ALONE).estimate(work)
    rows = rows_of(uri, outcome.shards)
    prompts = [f"user: {text}\nassistant: " if chat else text for text in PROMPTS]
    for row, own, theirs in zip(rows, sequences_of(uri, work), read_texts(uri, prompts), strict=True):
        assert len(row["teacher"]) == len(row["policy"]) == own.num_completion_tokens
        policy = compute_logprobs(Path(uri, "student"), [own], temperature=0.9)
        np.testing.assert_allclose(row["policy"], policy, atol=2e-5)
        expected = sum(compute_logprobs(Path(uri, "teacher"), [theirs], temperature=0.9)) - sum(policy)
        assert sum(row["teacher"]) - sum(row["policy"]) == pytest.approx(expected, abs=2e-4)
    assert outcome.metrics["aligned"] == sum(each.num_completion_tokens for each in sequences_of(uri, work))
    samples = credit(uri, work, outcome.shards, ALONE).to_pylist()
    signal = {(row["prompt_row"], row["sample"]): np.subtract(row["teacher"], row["policy"]) for row in rows}
    for sample in samples:
        expected = signal[sample["prompt_row"], sample["sample"]]
        np.testing.assert_allclose(sample["advantages"], expected, atol=1e-6)


def test_the_tokens_of_a_span_have_equal_advantages(uri, student, teacher):
    work = write_work(uri, student, teacher)
    row = rows_of(uri, start_worker(uri, CONFIG, algorithm=ALONE).estimate(work).shards)[0]
    own, theirs = (load_tokenizer(Path(uri, name)) for name in ("student", "teacher"))
    sides = []
    for tokenizer in (own, theirs):
        read = build_byte_decoder(tokenizer, where="tokenizer")
        sides.append(np.cumsum([len(read(token)) for token in tokenizer(TEXTS[0]).input_ids]))
    shared = np.intersect1d(*sides)
    [sequence, *_] = read_texts(uri, list(PROMPTS))
    scores = np.array(compute_logprobs(Path(uri, "teacher"), [sequence], temperature=0.9))
    policy, begin = np.array(row["policy"]), [0, 0]
    for end in shared:
        stops = [int(np.searchsorted(side, end, side="right")) for side in sides]
        own_part, their_part = slice(begin[0], stops[0]), slice(begin[1], stops[1])
        expected = (scores[their_part].sum() - policy[own_part].sum()) / (stops[0] - begin[0])
        np.testing.assert_allclose(np.subtract(row["teacher"], policy)[own_part], expected, atol=5e-5)
        begin = stops
    assert len(shared) < max(map(len, sides))


def test_with_the_policys_tokenizer_the_result_is_that_of_aligned_tokens(uri, student):
    other = publish_scratch(f"{uri}/run", Path(uri, "other"), seed=4)
    work = write_work(uri, student, other)
    found, expected = (
        rows_of(uri, start_worker(uri, CONFIG, algorithm=algorithm).estimate(work).shards)
        for algorithm in (ALONE, DistillationOnly(distillation=HELD))
    )
    for row, plain in zip(found, expected, strict=True):
        assert row["policy"] == plain["policy"]
        np.testing.assert_allclose(row["teacher"], plain["teacher"], rtol=1e-6)


def test_a_prompt_that_fills_the_context_of_the_teacher_gives_no_signal(uri, student, teacher):
    work, store = write_work(uri, student, teacher), open_store(f"{uri}/run")
    prompts = read_shard(store, work.prompts).to_pylist()
    prompts[1]["text"] = "long " * 200
    shard = write_shard(store, pa.Table.from_pylist(prompts, PROMPT_SCHEMA), kind="prompts", metadata={})
    rows = rows_of(uri, start_worker(uri, CONFIG, algorithm=ALONE).estimate(replace(work, prompts=shard)).shards)
    for row in rows:
        assert (row["teacher"] == row["policy"]) == (row["prompt_row"] == 1 or not row["policy"])


@pytest.mark.system
def test_two_ranks_agree_with_one_for_a_teacher_with_another_tokenizer(uri, student, teacher):
    work = write_work(uri, student, teacher)
    layouts = {"whole": {}, "sharded": {"zero_stage": 3}, "sequence parallel": {"sequence_parallel": 2}}
    jobs = {name: Job(change(CONFIG, **each), [work], algorithm=ALONE) for name, each in layouts.items()}
    alone = rows_of(uri, start_worker(uri, CONFIG, algorithm=ALONE).estimate(work).shards)
    for name, [outcome] in run_on_ranks(uri, jobs).items():
        for row, expected in zip(rows_of(uri, outcome.shards), alone, strict=True):
            np.testing.assert_allclose(row["teacher"], expected["teacher"], atol=1e-5, err_msg=name)
