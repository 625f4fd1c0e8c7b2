"""Process reward models: their training on step labels with real ranks, and their scores as rewards of steps."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Capo
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.process_models import (
    DirectoryProcessModel,
    ProcessModelReward,
    StepLabelFile,
    TrainedProcessModel,
)
from rheostat.models.config.reward_terms import PatternSteps, RegexReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.data.step_labels import load_step_labels
from rheostat.models.modeling.process_model import TOKEN_CLASSIFIER, check_process_model, score_steps
from rheostat.models.modeling.reward_model import load_reward_model
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import (
    CreditWork,
    JudgeWork,
    ProcessModelWork,
    ScoredShard,
    ScoringWork,
    UpdateWork,
    VerdictShard,
)
from rheostat.models.text.step_inputs import encode_steps
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.workers.reward_model import RewardModelWorker
from rheostat.models.workers.scoring import ScoringWorker
from tests.support import update_workers
from tests.support.policies import CLASSIFIERS, small_tokenizer
from tests.support.processes import preload
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.step_labels import write_solutions
from tests.support.training import publish_scratch
from tests.support.update_workers import Job, change, fetch_part, load_trained, run_on_ranks, start_worker

preload(__name__)

CONFIG = UpdateConfig(max_grad_norm=1e9)
ROOMY = change(update_workers.CONFIG, microbatch_tokens=4096)
LINES = PatternSteps(pattern=r"\n")


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def policy(uri, tmp_path_factory) -> ModelVersion:
    return publish_scratch(f"{uri}/run", tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> StepLabelFile:
    path = write_solutions(tmp_path_factory.mktemp("labels") / "steps.jsonl", 600)
    return StepLabelFile(path=path, heldout_fraction=0.3)


@pytest.fixture(scope="module")
def process_work(policy, labels):
    def build(**changes) -> ProcessModelWork:
        usual = {"steps": 6, "batch_size": 8, "learning_rate": 3e-3}
        training = TrainedProcessModel(labels=labels, **{**usual, **changes})
        return ProcessModelWork(policy=policy, training=training, separator="\n", seed=3)

    return build


@pytest.fixture(scope="module")
def trained(uri, process_work) -> Outcome:
    return start_worker(uri, ROOMY).train_process_model(process_work(steps=300, batch_size=32))


def compute_probabilities(directory, prompt: str, steps: list[str], separator: str = "\n") -> list[float]:
    """Return the probability that each step is right, computed by transformers alone, for one solution."""
    tokenizer, ends = load_tokenizer(directory), []
    model = AutoModelForTokenClassification.from_pretrained(directory).eval()
    tokens = tokenizer(prompt)["input_ids"]
    for step in steps:
        for text in (step, separator):
            tokens = tokens + tokenizer(text, add_special_tokens=False)["input_ids"]
        ends.append(len(tokens) - 1)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits.softmax(-1)[0, ends, 1].tolist()


# ---- training
def test_training_on_step_labels_raises_the_accuracy_on_held_out_steps(trained):
    metrics = trained.metrics
    assert metrics["loss_first"] == pytest.approx(0.693147, abs=1e-6)  # at first, every probability is 1/2
    assert metrics["heldout_right"] == pytest.approx(0.5, abs=0.05)
    assert metrics["heldout_accuracy"] > 0.8
    assert metrics["heldout_loss"] < 0.4
    assert (metrics["solutions"] + metrics["heldout_solutions"], metrics["heldout_labels"]) == (600, 220)


def test_held_out_loss_and_accuracy_are_those_of_the_token_classifier_in_plain_transformers(uri, trained, labels):
    directory = fetch_part(uri, trained, "weights")
    losses, right = [], []
    for each in load_step_labels(labels, "heldout")[0]:
        values = compute_probabilities(directory, each.prompt, list(each.steps))
        for value, label in zip(values, each.labels, strict=True):
            losses.append(-torch.tensor(value if label else 1 - value).log())
            right.append((value > 0.5) == (label > 0.5))
    assert float(torch.stack(losses).mean()) == pytest.approx(trained.metrics["heldout_loss"], abs=1e-4)
    assert sum(right) / len(right) == pytest.approx(trained.metrics["heldout_accuracy"])


@pytest.mark.thorough_after(1)
def test_the_same_labels_give_the_same_bits_and_no_optimizer_state(uri, policy, process_work):
    first, second = (start_worker(uri, CONFIG).train_process_model(process_work()) for _ in range(2))
    assert second.model == first.model
    assert (first.model.version, first.model.state) == (0, None)
    assert first.model.weights != policy.weights


def assert_alike(uri: str, first: Outcome, second: Outcome) -> None:
    for name, value in first.metrics.items():
        assert second.metrics[name] == pytest.approx(value, abs=1e-4), name
    weights, others = (load_trained(uri, outcome.model) for outcome in (first, second))
    torch.testing.assert_close(others, weights, atol=2e-4, rtol=0)


@pytest.mark.thorough_after(1)
def test_the_size_of_a_micro_batch_does_not_change_the_trained_weights(uri, process_work):
    small, large = (
        start_worker(uri, change(CONFIG, microbatch_tokens=size)).train_process_model(process_work())
        for size in (1, 99_999)
    )
    assert_alike(uri, small, large)


@pytest.mark.system
def test_two_ranks_train_the_same_weights_as_one_rank(uri, process_work):
    kinds = [{"microbatch_tokens": 150}, {"zero_stage": 2}, {"zero_stage": 3}, {"sequence_parallel": 2}]
    jobs = {str(kind): Job(change(CONFIG, **kind), [process_work()]) for kind in kinds}
    jobs["one solution"] = Job(CONFIG, [process_work(steps=2, batch_size=1)])
    found = run_on_ranks(uri, jobs)
    alone = start_worker(uri, CONFIG).train_process_model(process_work())
    for kind in kinds:
        assert_alike(uri, alone, found[str(kind)][0])
    assert found["one solution"][0].metrics["steps"] == 2  # the rank without a solution takes part in both steps


def test_rows_beyond_the_context_are_left_out_and_counted(uri, policy, labels, tmp_path):
    rows = [json.loads(line) for line in labels.path.read_text().splitlines()[:40]]
    rows.append({"prompt": "1+1?", "completions": ["1" * 4000], "labels": [0]})
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = StepLabelFile(path=path, heldout_fraction=0.3, drop=("too_long",))
    training = TrainedProcessModel(labels=file, steps=1, batch_size=4)
    outcome = start_worker(uri).train_process_model(ProcessModelWork(policy, training, "\n", 0))
    assert outcome.metrics["dropped_too_long"] == 1
    assert outcome.metrics["solutions"] + outcome.metrics["heldout_solutions"] == 40


def test_training_that_diverges_is_quarantined(uri, process_work):
    with pytest.raises(Quarantined, match="step 1 on step labels"):
        start_worker(uri).train_process_model(process_work(learning_rate=1e30))


# ---- scores
def write_classifier(directory, architecture: str = "llama", *, labels: int = 2):
    """Write a random token classifier, as TRL's former PRMTrainer saved it."""
    tokenizer, (config, shape) = small_tokenizer(), CLASSIFIERS[architecture]
    torch.manual_seed(7)
    model = AutoModelForTokenClassification.from_config(
        config(**shape, vocab_size=len(tokenizer), num_labels=labels, pad_token_id=tokenizer.pad_token_id)
    )
    torch.nn.init.normal_((model.score if hasattr(model, "score") else model.classifier).weight)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 64}))
    return directory


REWARD = ProcessModelReward(
    model=DirectoryProcessModel(path="unused"), name="right", steps=LINES, aggregate="product", batch_tokens=100
)
PAIRS = [("1+2?", "1+2=3\n3+0=3\n"), ("1+2?", "3"), ("2+2?", ""), ("2+2?", "1\n\n\n2\n3\n4"), ("9?", "so\n" * 40)]


def write_completions(store, pairs):
    tokenizer, rows = small_tokenizer(), []
    for row, (prompt, completion) in enumerate(pairs):
        tokens = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        columns = {"completion_tokens": tokens, "logprobs": [-5.0] * len(tokens), "prompt_tokens": [5, 6]}
        columns["segments"] = [{"policy_version": 0, "tokens": len(tokens)}]
        rows.append(rollout(row // 2, row % 2, completion, prompt=prompt, **columns))
    return write_rollouts(store, *rows)


def judge(root: str, model: ModelVersion, rollouts, reward: ProcessModelReward = REWARD) -> Outcome:
    worker = RewardModelWorker(root, "run", "right", reward, 1)
    return worker.judge(JudgeWork(1, rollouts, model=model, seed=0))


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_scores_of_steps_equal_those_of_a_token_classifier_in_plain_transformers(tmp_path, architecture):
    directory, store = write_classifier(tmp_path / "model", architecture), open_store(f"{tmp_path}/run")
    assert check_process_model(directory) > 0
    model = ModelVersion(0, publish_bundle(store, directory, prefix="policies"))
    outcome = judge(str(tmp_path), model, write_completions(store, PAIRS))
    *rows, last = read_shard(store, outcome.shards[0]).to_pylist()
    steps = [["1+2=3", "3+0=3"], ["3"], [""], ["1", "2", "3", "4"]]
    for row, (prompt, _), texts in zip(rows, PAIRS, steps, strict=False):
        expected = compute_probabilities(directory, prompt, texts)
        assert row["step_values"] == pytest.approx(expected, abs=1e-4)
        assert row["value"] == pytest.approx(torch.tensor(row["step_values"]).double().prod().item(), rel=1e-6)
        assert row["steps"] is None
    assert (last["value"], last["step_values"]) == (None, None)
    assert "expected 1 to 64" in last["error"]
    assert (outcome.metrics["answers"], outcome.metrics["invalid"]) == (5, 1)


def test_a_classifier_of_whole_texts_or_with_other_labels_is_refused(tmp_path):
    with pytest.raises(BadInput, match="two labels, for wrong and right steps, but it has 3 labels"):
        check_process_model(write_classifier(tmp_path / "three", labels=3))
    path = write_classifier(tmp_path / "whole") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(BadInput, match="must be the token classifier LlamaForTokenClassification"):
        check_process_model(path.parent)


# ---- credit and update
def compute_logprob(directory, prompt: str, text: str) -> float:
    """Return the log-prob of a text after a prompt, computed by transformers alone."""
    tokenizer, model = load_tokenizer(directory), AutoModelForCausalLM.from_pretrained(directory).eval()
    before, tokens = tokenizer(prompt)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logprobs = model(torch.tensor([[*before, *tokens]])).logits[0].log_softmax(-1)
    return sum(float(logprobs[len(before) + place - 1, token]) for place, token in enumerate(tokens))


def test_the_trained_model_scores_steps_and_the_policy_is_updated_with_credit_for_each_step(uri, policy, trained):
    store, reward = open_store(f"{uri}/run"), change(REWARD, aggregate="min")
    directory = fetch_bundle(store, policy.weights)
    tokenizer = load_tokenizer(directory)
    texts = ["1+1=2\n2+2=4\n", "1+1=3\n3+2=5\n"]  # the second solution begins with a wrong step
    rows = []
    for sample, text in enumerate(texts):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        columns = {"completion_tokens": tokens, "logprobs": [-5.0] * len(tokens)}
        columns["prompt_tokens"] = tokenizer("1+1+2?")["input_ids"]
        columns["segments"] = [{"policy_version": 0, "tokens": len(tokens)}]
        rows.append(rollout(0, sample, text, prompt="1+1+2?", **columns))
    rollouts = write_rollouts(store, *rows)
    [verdicts] = judge(uri, trained.model, rollouts, reward).shards
    right, wrong = read_shard(store, verdicts)["step_values"].to_pylist()
    assert min(right) > 0.5 > wrong[0]

    scoring = ScoringConfig(rewards=(RegexReward(pattern="=4", weight=0.0), reward))
    worker = ScoringWorker(uri, "run", scoring, Capo(allow_low_outcome=True))
    work = ScoringWork(
        iteration=1, rollouts=rollouts, verdicts=(VerdictShard("right", verdicts),), tokenizer=policy.weights
    )
    [scores] = worker.score(work).shards
    table = read_shard(store, scores).to_pydict()
    assert table["values_right"] == [pytest.approx(right), pytest.approx(wrong)]
    assert table["reward_right"] == pytest.approx([min(right), min(wrong)])
    first_lines = [text.partition("\n")[0] + "\n" for text in texts]
    first_steps = [len(tokens) for tokens in tokenizer(first_lines, add_special_tokens=False)["input_ids"]]
    assert table["spans_right"] == [[0, length] for length in first_steps]

    shard = ScoredShard(rollouts=rollouts, scores=scores)
    [samples] = worker.credit(CreditWork(iteration=1, shards=(shard,), policy_version=0, max_new_tokens=64)).shards
    worker.close()
    for advantages, length in zip(read_shard(store, samples)["advantages"].to_pylist(), first_steps, strict=True):
        assert len({*advantages[:length]}) == len({*advantages[length:]}) == 1
    of_right, of_wrong = read_shard(store, samples)["advantages"].to_pylist()
    assert of_wrong[0] < 0 < of_right[0]

    update = UpdateWork(
        iteration=0,
        policy=policy,
        reference=policy,
        samples=(samples,),
        total_iterations=1,
        seed=0,
        kl_coefficient=0.0,
    )
    updated = start_worker(uri, change(CONFIG, learning_rate=1e-3)).update(update)
    preferences = []
    for path in (directory, fetch_bundle(store, updated.model.weights)):
        right_step, wrong_step = (compute_logprob(path, "1+1+2?", line) for line in first_lines)
        preferences.append(right_step - wrong_step)
    assert preferences[1] > preferences[0]


def test_a_solution_of_exactly_the_context_length_is_scored(tmp_path):
    directory = write_classifier(tmp_path / "model", "gpt2")
    model, steps = load_reward_model(directory, device="cpu", kind=TOKEN_CLASSIFIER), ["1+2=3"]
    encode = partial(encode_steps, load_tokenizer(directory), "3+0=", separator="\n", source="here")
    while len(encode(steps)) - 1 < model.context:
        steps[0] += "+1"
    inputs = [encode(steps), encode([steps[0] + "+1"])]
    assert len(inputs[0]) - 1 == model.context
    fits, exceeds = score_steps(model, inputs, how="min", batch_tokens=4096, on_pass=lambda rows, seconds: None)
    assert fits.steps == pytest.approx(compute_probabilities(directory, "3+0=", steps), abs=1e-4)
    assert fits.error is None and "expected 1 to 64" in exceeds.error
