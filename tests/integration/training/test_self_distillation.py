"""Self-distillation: the policy reads a privileged prompt and scores the completions of its own prompt."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.experimental.sdft.loss_utils import compute_sampled_token_self_distillation_loss
from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder
from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder

from rheostat.infra.errors import BadInput
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.algorithms.advantages import distillation
from rheostat.models.algorithms.experience import AuxiliaryScores
from rheostat.models.config.algorithms import DistillationOnly
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.teachers import Distillation, TeacherPolicy, TopK
from rheostat.models.data.problems import Message
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FEEDBACK_COLUMN, PROMPT_SCHEMA, TOP_IDS, TOP_LOGPROBS, score_schema
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import EstimateWork, ScoredShard
from rheostat.models.text.privileged_prompts import build_privileged_prompt
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.workers.teacher_inputs import choose_solutions
from tests.support.distillation import SCORING, credit, rows_of, sequences_of
from tests.support.experiences import Drawn, experience
from tests.support.losses import evaluate_loss, pass_tokens
from tests.support.processes import preload
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.teachers import compute_logprobs
from tests.support.training import publish_scratch
from tests.support.update_workers import LORA, Job, change, run_on_ranks, start_worker

preload(__name__)

CONFIG = UpdateConfig(microbatch_tokens=150, learning_rate=1e-3, minibatches=1)
PROMPTS = ("What is 3 + 4? ", "What is 12 - 5? ", "What is 6 * 7? ")
ANSWERS = ("7", "7", "42")
HINTS = ("count", None, ["multiply", 6])
REWARDS = ((0.0, 1.0, 1.0), (0.5, 0.0, 0.9), (1.0, 0.0, 0.0))
ANSWER_FIRST = "The answer is {answer} ({hint}).\n{prompt}"
FEEDBACK = (("7 is wrong", "", None), (" \n", "see {solution}", "7 is wrong"), (None, "almost", "no\nno"))
SOLVED = "{prompt}\nCorrect solution:\n\n{solution}\n\n\n\nCorrectly solve the original question.\n"
TOLD = "{prompt}\nThe following is feedback: {feedback}.\n"


@pytest.fixture
def student(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "student"))


def distilled(template: str, *, top_k: TopK | None = None, **changes) -> DistillationOnly:
    teacher = TeacherPolicy(template=template, **changes)
    return DistillationOnly(distillation=Distillation(teacher=teacher, top_k=top_k))


def write_work(uri: str, student: ModelVersion, *, longest: int = 12, has_feedback: bool = True) -> EstimateWork:
    """Return a work unit with three completions of random tokens for each prompt."""
    store, tokenizer, rng = open_store(f"{uri}/run"), load_tokenizer(Path(uri, "student")), np.random.default_rng(3)
    prompts = [
        {"prompt_id": str(row), "text": text, "answer": ANSWERS[row], "columns": json.dumps({"hint": HINTS[row]})}
        for row, text in enumerate(PROMPTS)
    ]
    rollouts, scores, terms = [], [], SCORING.terms
    for row, text in enumerate(PROMPTS):
        for sample, reward in enumerate(REWARDS[row]):
            length = int(rng.integers(2, longest))
            columns = {
                "prompt_tokens": tokenizer(text).input_ids,
                "completion_tokens": rng.integers(2, 300, length).tolist(),
                "logprobs": rng.normal(-5, 1, length).tolist(),
                "segments": [{"policy_version": 0, "tokens": length}],
            }
            rollouts.append(rollout(row, sample, "", **columns))
            values = {"reward": reward, f"reward_{terms[0]}": reward, FEEDBACK_COLUMN: FEEDBACK[row][sample]}
            scores.append({"prompt_row": row, "sample": sample, **values})
    table = pa.Table.from_pylist(scores, score_schema(terms, has_feedback=has_feedback))
    scored = write_shard(store, table, kind="scores", metadata={})
    shard = write_shard(store, pa.Table.from_pylist(prompts, PROMPT_SCHEMA), kind="prompts", metadata={})
    shards = (ScoredShard(write_rollouts(store, *rollouts), scored),)
    return EstimateWork(iteration=1, shards=shards, policy=student, prompts=shard)


def with_prompts(uri: str, work: EstimateWork, texts: list[str]) -> list[ModelInput]:
    """Return the completions of the work unit after other prompts."""
    tokenizer, sequences = load_tokenizer(Path(uri, "student")), sequences_of(uri, work)
    return [
        ModelInput.from_prompt(tokenizer(text).input_ids).append_completion(each.completion)
        for text, each in zip(texts, sequences, strict=True)
    ]


def privileged_texts() -> list[str]:
    hints = [hint if isinstance(hint, str) else json.dumps(hint) for hint in HINTS]
    rows = zip(PROMPTS, ANSWERS, hints, strict=True)
    return [f"The answer is {answer} ({hint}).\n{prompt}" for prompt, answer, hint in rows for _ in range(3)]


def join(rows: list[dict], name: str) -> np.ndarray:
    return np.concatenate([row[name] for row in rows])


def test_the_teacher_scores_the_completion_after_the_privileged_prompt(uri, student):
    work, algorithm = write_work(uri, student), distilled(ANSWER_FIRST)
    outcome = start_worker(uri, CONFIG, algorithm=algorithm).estimate(work)
    rows = rows_of(uri, outcome.shards)
    expected = compute_logprobs(Path(uri, "student"), with_prompts(uri, work, privileged_texts()), temperature=0.9)
    own = compute_logprobs(Path(uri, "student"), sequences_of(uri, work), temperature=0.9)
    np.testing.assert_allclose(join(rows, "teacher"), expected, atol=2e-5)
    np.testing.assert_allclose(join(rows, "policy"), own, atol=2e-5)
    samples = credit(uri, work, outcome.shards, algorithm).to_pylist()
    np.testing.assert_allclose(join(samples, "advantages"), np.subtract(expected, own), atol=4e-5)
    assert np.abs(join(samples, "advantages")).max() > 1e-3
    assert outcome.metrics["privileged"] == 9


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"lora": LORA}, {"zero_stage": 3}], ids=str)
def test_a_template_that_is_the_students_prompt_gives_advantages_of_exactly_zero(uri, student, changes):
    work, algorithm = write_work(uri, student), distilled("{prompt}")
    estimates = start_worker(uri, change(CONFIG, **changes), algorithm=algorithm).estimate(work).shards
    advantages = join(credit(uri, work, estimates, algorithm).to_pylist(), "advantages")
    assert len(advantages) > 30
    assert not advantages.any()


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 3}], ids=str)
def test_the_most_probable_tokens_are_those_after_the_privileged_prompt(uri, student, changes):
    work, algorithm = write_work(uri, student), distilled(ANSWER_FIRST, top_k=TopK(tokens=5))
    rows = rows_of(uri, start_worker(uri, change(CONFIG, **changes), algorithm=algorithm).estimate(work).shards)
    model = AutoModelForCausalLM.from_pretrained(Path(uri, "student")).eval()
    for row, each in zip(rows, with_prompts(uri, work, privileged_texts()), strict=True):
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(each.tokens.astype(np.int64))[None]).logits[0] / 0.9
        best = logits_TV.log_softmax(-1)[each.num_prompt_tokens - 1 : -1].topk(5)
        assert row[TOP_IDS] == best.indices.flatten().tolist()
        np.testing.assert_allclose(row[TOP_LOGPROBS], best.values.flatten(), atol=2e-5)


@pytest.mark.parametrize(
    ("template", "is_privileged"),
    [
        (SOLVED, [1, 1, 1, 0, 0, 0, 0, 1, 1]),
        (TOLD, [1, 0, 0, 0, 1, 1, 0, 1, 1]),
        ("{feedback}\n" + SOLVED, [1, 1, 1, 0, 1, 1, 0, 1, 1]),
    ],
    ids=["solution", "feedback", "both"],
)
def test_a_solution_is_the_best_other_completion_and_feedback_is_about_the_completion(
    uri, student, template, is_privileged
):
    """Selection, prompt and sequence are those that TRL builds for SDPO."""
    work = write_work(uri, student, has_feedback="{feedback}" in template)
    tokenizer = load_tokenizer(Path(uri, "student"))
    outcome = start_worker(uri, CONFIG, algorithm=distilled(template)).estimate(work)
    rows = rows_of(uri, outcome.shards)
    completions = [torch.from_numpy(each.completion.astype(np.int64)) for each in sequences_of(uri, work)]
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_value=tokenizer.pad_token_id)
    settings = SimpleNamespace(
        reprompt_template=template,
        solution_template="{successful_previous_attempt}",
        feedback_template="{feedback_raw}",
        success_reward_threshold=1.0,
        dont_reprompt_on_self_success=True,
        environment_feedback_only_without_solution=False,
        use_successful_as_teacher="{solution}" in template,
        include_environment_feedback="{feedback}" in template,
        remove_thinking_from_demonstration=False,
        max_reprompt_len=10240,
    )
    accelerator = SimpleNamespace(
        device="cpu", process_index=0, gather=lambda each: each, pad_across_processes=lambda each, **_: each
    )
    trainer = SimpleNamespace(
        args=settings,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        num_generations=3,
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        _tokenize_prompts_untruncated=lambda prompts: [tokenizer(each).input_ids for each in prompts],
    )
    built = SuccessfulRolloutTeacherContextBuilder(trainer).build(
        {"completion_ids": padded(completions), "completion_mask": padded([torch.ones_like(x) for x in completions])},
        [prompt for prompt in PROMPTS for _ in range(3)],
        torch.tensor(REWARDS).flatten(),
        [text for texts in FEEDBACK for text in texts],
    )
    assert built["self_distillation_mask"].tolist() == is_privileged
    assert outcome.metrics["privileged"] == sum(is_privileged)
    prompt_width = built["teacher_input_ids"].shape[1] - max(map(len, completions))
    for index, row in enumerate(rows):
        prompt = built["teacher_input_ids"][index, :prompt_width]
        prompt = prompt[built["teacher_attention_mask"][index, :prompt_width] == 1].numpy()
        sequence = ModelInput.from_prompt(prompt).append_completion(completions[index].numpy())
        expected = compute_logprobs(Path(uri, "student"), [sequence], temperature=0.9)
        np.testing.assert_allclose(row["teacher"], expected, atol=2e-5)
        if not built["self_distillation_mask"][index]:
            assert row["teacher"] == row["policy"]


def test_the_solution_with_the_highest_reward_and_the_lowest_number_is_chosen():
    table = pa.table({"prompt_row": [4, 4, 4, 9, 9, 9], "sample": [0, 1, 2, 0, 1, 2]})
    values = [0.5, 0.9, 0.9, float("nan"), 0.2, 0.4]
    names = ((4, 0), (4, 1), (4, 2), (9, 0), (9, 1), (9, 2))
    rewards = dict(zip(names, values, strict=True))
    choose = partial(choose_solutions, table, (0, 1, 2, 3, 4, 5), rewards)
    assert choose(min_reward=0.5) == {0: 1, 1: 2, 2: 1}
    assert choose(min_reward=0.3) == {0: 1, 1: 2, 2: 1, 3: 5, 4: 5}
    assert choose(min_reward=1.0) == {}


@pytest.mark.parametrize("field", ["{solution}", "{feedback}"])
def test_a_text_that_does_not_fit_into_the_context_leaves_the_students_prompt(uri, student, field):
    work = write_work(uri, student)
    algorithm = distilled("{prompt}" + "x y " * 130 + field)
    outcome = start_worker(uri, CONFIG, algorithm=algorithm).estimate(work)
    assert outcome.metrics["privileged"] == 0
    for row in rows_of(uri, outcome.shards):
        assert row["teacher"] == row["policy"]


def test_work_without_the_prompts_is_refused(uri, student):
    work = replace(write_work(uri, student), prompts=None)
    with pytest.raises(BadInput, match="must name the prompts"):
        start_worker(uri, CONFIG, algorithm=distilled("{prompt}")).estimate(work)


@pytest.mark.system
def test_two_ranks_agree_with_one_for_privileged_prompts(uri, student):
    work, algorithm = write_work(uri, student), distilled(SOLVED)
    layouts = {"whole": {}, "sharded": {"zero_stage": 3}, "sequence parallel": {"sequence_parallel": 2}}
    jobs = {name: Job(change(CONFIG, **each), [work], algorithm=algorithm) for name, each in layouts.items()}
    alone = join(rows_of(uri, start_worker(uri, CONFIG, algorithm=algorithm).estimate(work).shards), "teacher")
    for name, [outcome] in run_on_ranks(uri, jobs).items():
        np.testing.assert_allclose(join(rows_of(uri, outcome.shards), "teacher"), alone, atol=1e-5, err_msg=name)


def test_the_gradient_of_the_advantages_is_that_of_trls_sampled_token_loss():
    generator = torch.Generator().manual_seed(0)
    student_NV, teacher_NV = torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)
    tokens_N = torch.randint(11, (7,), generator=generator)
    gradients = []
    for is_trl in (True, False):
        leaf = student_NV.clone().requires_grad_()
        if is_trl:
            loss = compute_sampled_token_self_distillation_loss(
                leaf[None], teacher_NV[None], tokens_N[None], distillation_alpha=1.0
            ).sum()
        else:
            student_N, teacher_N = (each.log_softmax(-1)[range(7), tokens_N] for each in (leaf, teacher_NV))
            before_N = student_N.detach()
            scores = AuxiliaryScores(teacher_T=teacher_N.numpy(), policy_T=before_N.numpy())
            settings = Distillation(teacher=TeacherPolicy(template="{prompt}"))
            advantages_N = distillation(experience(Drawn([1.0], [7]), auxiliary_scores=scores), settings)
            tokens = pass_tokens([7], behaviour=before_N.tolist(), advantages=advantages_N.tolist())
            _, gradient_N, _ = evaluate_loss(before_N, tokens, UpdateConfig())
            loss = (student_N * gradient_N).sum()
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.1


def test_the_privileged_chat_is_that_of_trls_demonstrations():
    template = "{prompt}\n\nAn example of a response: {demonstration}"
    settings = SimpleNamespace(teacher_prompt_template=template.replace("demonstration", "privileged_context"))
    builder = DemonstrationTeacherContextBuilder(SimpleNamespace(args=settings))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is {x} blue?"}]
    expected = builder.select_generation_prompts([chat, "Why {y}?"], ["It scatters.", "Light."])
    messages = tuple(Message(each["role"], each["content"]) for each in chat)
    build = partial(build_privileged_prompt, teacher=TeacherPolicy(template=template), answer="", source="row 1")
    found = build(messages, columns={"demonstration": "It scatters."})
    assert [message.encode() for message in found] == expected[0]
    assert build("Why {y}?", columns={"demonstration": "Light."}) == expected[1]


def test_a_template_with_an_unknown_or_ambiguous_field_or_a_chat_without_a_last_user_message_is_refused():
    build = partial(build_privileged_prompt, answer="", columns={"demonstration": "d"}, source="train.jsonl:1")
    with pytest.raises(BadInput, match=r"train.jsonl:1: .*\{demo_stration\}.* did you mean 'demonstration'"):
        build("a", teacher=TeacherPolicy(template="{prompt} {demo_stration}"))
    with pytest.raises(BadInput, match=r"train.jsonl:1: .*\{feedback\}.*column 'feedback'.*Rename the column"):
        build("a", teacher=TeacherPolicy(template="{prompt} {feedback}"), columns={"feedback": "f"})
    with pytest.raises(BadInput, match="the last message of the chat has the role 'assistant'"):
        build((Message("user", "a"), Message("assistant", "b")), teacher=TeacherPolicy(template="{prompt}"))


def test_stored_estimates_keep_the_students_prompt_in_the_samples(uri, student):
    work, algorithm = write_work(uri, student), distilled(ANSWER_FIRST)
    estimates = start_worker(uri, CONFIG, algorithm=algorithm).estimate(work).shards
    rollouts = read_shard(open_store(f"{uri}/run"), work.shards[0].rollouts).to_pylist()
    for sample, row in zip(credit(uri, work, estimates, algorithm).to_pylist(), rollouts, strict=True):
        assert sample["tokens"] == row["prompt_tokens"] + row["completion_tokens"]
