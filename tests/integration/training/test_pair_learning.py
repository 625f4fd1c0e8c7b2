"""Training on preferences with real ranks: the trained weights, reproducibility, and equality over parallel layouts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from scipy.special import expit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rheostat.infra.errors import Quarantined
from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.judges import TrainedRewardModel
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.preference_losses import CpoLoss, IpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from rheostat.models.config.preferences import AnswerPreferences, FilePreferences, LabeledPreferences
from rheostat.models.config.training import DpoConfig, WarmupConfig
from rheostat.models.data.preferences import load_preferences
from rheostat.models.modeling.reward_model import load_reward_model, score
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import PreferenceWork, RewardModelWork, WarmupWork
from rheostat.models.text.sequences import encode, policy_pairs
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.training.trainer import Trainer
from tests.support import update_workers
from tests.support.processes import preload
from tests.support.training import DATA
from tests.support.update_workers import (
    Job,
    change,
    fetch_part,
    load_trained,
    perform,
    run_on_ranks,
    start_worker,
)

preload(__name__)

PREFERENCES = AnswerPreferences(train_pairs=64, heldout_pairs=16)
DPO = DpoConfig(steps=6, batch_size=8, learning_rate=1e-3)
TRAINING = TrainedRewardModel(steps=6, batch_size=8, learning_rate=3e-3)
CONFIG = UpdateConfig(max_grad_norm=1e9)
ROOMY = change(update_workers.CONFIG, microbatch_tokens=4096)
TEMPLATE = "{prompt}{completion}<|eos|>"


def dpo_work(policy: ModelVersion, dpo: DpoConfig = DPO, preferences=PREFERENCES) -> PreferenceWork:
    return PreferenceWork(policy=policy, data=DATA, preferences=preferences, dpo=dpo, seed=3)


def reward_work(
    policy: ModelVersion, training: TrainedRewardModel = TRAINING, *, template: str | None = TEMPLATE
) -> RewardModelWork:
    return RewardModelWork(
        policy=policy, data=DATA, preferences=PREFERENCES, training=training, template=template, seed=3
    )


LOSSES = {
    "ipo": IpoLoss(),
    "simpo": SimpoLoss(),
    "cpo": CpoLoss(),
    "orpo": OrpoLoss(weight=1.0),
    "kto": KtoLoss(desirable_weight=1.2),
}


def loss_work(policy: ModelVersion, kind: str, **changes) -> PreferenceWork:
    return dpo_work(policy, change(DPO, loss=LOSSES[kind], **changes))


def works_of(policy: ModelVersion) -> dict[str, PreferenceWork | RewardModelWork]:
    losses = {kind: loss_work(policy, kind) for kind in LOSSES}
    return {"dpo": dpo_work(policy), "rewards": reward_work(policy), **losses}


def learn(uri: str, policy: ModelVersion, kind: str, **changes) -> Outcome:
    return perform(start_worker(uri, change(CONFIG, **changes)), works_of(policy)[kind])


def assert_alike(uri: str, first: Outcome, second: Outcome) -> None:
    for name, value in first.metrics.items():
        assert second.metrics[name] == pytest.approx(value, abs=1e-4), name
    assert second.detail["losses"] == pytest.approx(first.detail["losses"], abs=1e-5)
    weights, others = (load_trained(uri, outcome.model) for outcome in (first, second))
    torch.testing.assert_close(others, weights, atol=2e-4, rtol=0)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", ["dpo", "rewards"])
def test_the_same_pairs_give_the_same_bits_and_no_optimizer_state(uri, policy, kind):
    first = learn(uri, policy, kind)
    assert learn(uri, policy, kind).model == first.model
    assert (first.model.version, first.model.state) == (0, None)
    assert first.model.weights != policy.weights
    assert first.metrics["loss_first"] == pytest.approx(0.693147, abs=1e-6)  # at first, neither completion is preferred
    assert first.metrics["loss_last"] < 0.69


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", ["kto", "dpo", "rewards", "cpo", "orpo", "simpo", "ipo"])
def test_the_size_of_a_micro_batch_does_not_change_the_trained_weights(uri, policy, kind):
    small, large = (learn(uri, policy, kind, microbatch_tokens=size) for size in (1, 99_999))
    assert_alike(uri, small, large)


def label_work(tmp_path: Path, policy: ModelVersion, **changes) -> PreferenceWork:
    """Return the work of KTO on single completions, the chosen and the rejected ones of pairs in turn."""
    for split in ("train", "heldout"):
        pairs = load_preferences(PREFERENCES, DATA, split=split, seed=3)
        rows = [
            {
                "prompt": pair.prompt,
                "completion": pair.rejected if number % 3 else pair.chosen,
                "label": number % 3 == 0,
            }
            for number, pair in enumerate(pairs)
        ]
        Path(tmp_path, f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = LabeledPreferences(path=Path(tmp_path, "train.jsonl"), heldout_path=Path(tmp_path, "heldout.jsonl"))
    return dpo_work(policy, change(DPO, loss=KtoLoss(desirable_weight=2.0), **changes), files)


def test_kto_on_single_completions_depends_neither_on_micro_batches_nor_on_another_run(uri, policy, tmp_path):
    work = label_work(tmp_path, policy)
    small, large = (perform(start_worker(uri, change(CONFIG, microbatch_tokens=size)), work) for size in (1, 99_999))
    assert_alike(uri, small, large)
    assert (small.metrics["pairs"], small.metrics["heldout_pairs"]) == (64, 16)
    rewards = [small.metrics[f"heldout_{name}_reward"] for name in ("desirable", "undesirable")]
    assert rewards[0] - rewards[1] == pytest.approx(small.metrics["heldout_margin"])
    assert rewards[0] != 0 != rewards[1]


def test_kto_on_single_completions_raises_desirable_over_undesirable_rewards(uri, policy, tmp_path):
    worker = start_worker(uri, ROOMY)
    found = worker.prefer(label_work(tmp_path, policy, steps=100, learning_rate=5e-3)).metrics
    assert found["margin"] > 1 < found["desirable_reward"] and found["heldout_margin"] > 0
    assert found["accuracy"] > 0.5
    assert found["loss_last"] < 0.5 < found["loss_first"]


@pytest.mark.system
def test_two_ranks_train_the_same_weights_on_single_completions_as_one_rank(uri, policy, tmp_path):
    work = label_work(tmp_path, policy)
    alone = perform(start_worker(uri, CONFIG), work)
    kinds = [{"microbatch_tokens": 150}, {"zero_stage": 3}, {"sequence_parallel": 2}]
    jobs = {str(number): Job(change(CONFIG, **kind), [work]) for number, kind in enumerate(kinds)}
    for [found] in run_on_ranks(uri, jobs).values():
        assert_alike(uri, alone, found)


@pytest.mark.system
def test_two_ranks_train_the_same_weights_as_one_rank(uri, policy):
    kinds = [{"microbatch_tokens": 150}, {"zero_stage": 2}, {"zero_stage": 3}, {"sequence_parallel": 2}]
    configs = [change(CONFIG, **kind) for kind in kinds]
    works = {kind: work for kind, work in works_of(policy).items() if kind in ("dpo", "rewards", "cpo", "kto")}
    jobs = {f"{kind} {number}": Job(config, [works[kind]]) for kind in works for number, config in enumerate(configs)}
    jobs["one pair"] = Job(CONFIG, [reward_work(policy, change(TRAINING, steps=2, batch_size=1))])
    found = run_on_ranks(uri, jobs)
    for kind in works:
        alone = learn(uri, policy, kind)
        for number in range(len(configs)):
            assert_alike(uri, alone, found[f"{kind} {number}"][0])
    assert found["one pair"][0].metrics["steps"] == 2  # the rank without a pair takes part in both steps


def test_both_completions_of_a_pair_end_with_the_eos_token(uri, policy):
    tokenizer = tokenizer_of(uri, policy)
    pairs = load_preferences(PREFERENCES, DATA, split="train", seed=0)
    for pair, sequences in zip(pairs, policy_pairs(pairs, tokenizer, context=256), strict=True):
        for text, sequence in ((pair.chosen, sequences.chosen), (pair.rejected, sequences.rejected)):
            assert sequence.tokens[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(sequence.tokens[:-1]) == pair.prompt + text
            assert tokenizer.decode(sequence.prompt) == pair.prompt


def tokenizer_of(uri: str, policy: ModelVersion) -> PreTrainedTokenizerFast:
    return load_tokenizer(fetch_bundle(open_store(f"{uri}/run"), policy.weights))


def test_training_on_preferences_raises_the_accuracy_on_held_out_pairs(uri, policy):
    worker = start_worker(uri, ROOMY)
    warm = worker.warmup(
        WarmupWork(policy=policy, data=DATA, warmup=WarmupConfig(steps=40, batch_size=16), seed=3)
    ).model
    dpo = worker.prefer(dpo_work(warm, change(DPO, steps=40)))
    assert dpo.metrics["heldout_accuracy"] > 0.7
    assert dpo.metrics["heldout_margin"] > 0
    assert dpo.metrics["heldout_loss"] < 0.69
    rewards = worker.train_reward_model(reward_work(warm, change(TRAINING, steps=40)))
    assert rewards.metrics["heldout_accuracy"] > 0.6
    assert rewards.metrics["heldout_margin"] > 0.2
    assert len(rewards.detail["losses"]) == 40


def completion_logprob(model, tokenizer, prompt: str, completion: str) -> float:
    """Return the log-prob of the completion and of the EOS after it, by transformers alone."""
    before = tokenizer(prompt)["input_ids"]
    tokens = [*before, *tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return sum(float(logprobs[place - 1, tokens[place]]) for place in range(len(before), len(tokens)))


def test_the_margin_of_held_out_pairs_is_that_of_both_policies_in_plain_transformers(uri, policy):
    outcome = learn(uri, policy, "dpo")
    tokenizer = tokenizer_of(uri, policy)
    paths = [fetch_bundle(open_store(f"{uri}/run"), policy.weights), fetch_part(uri, outcome, "weights")]
    start_model, end_model = (AutoModelForCausalLM.from_pretrained(path).eval() for path in paths)
    margins = []
    for pair in load_preferences(PREFERENCES, DATA, split="heldout", seed=3):
        better, worse = (
            completion_logprob(end_model, tokenizer, pair.prompt, text)
            - completion_logprob(start_model, tokenizer, pair.prompt, text)
            for text in (pair.chosen, pair.rejected)
        )
        margins.append(DPO.beta * (better - worse))
    assert sum(margins) / len(margins) == pytest.approx(outcome.metrics["heldout_margin"], abs=1e-4)
    right = sum(margin > 0 for margin in margins) / len(margins)
    assert right == pytest.approx(outcome.metrics["heldout_accuracy"])


@pytest.mark.parametrize("kind", ["kto", pytest.param("ipo", marks=pytest.mark.thorough)])
def test_the_held_out_metrics_of_losses_with_a_reference_are_those_of_both_policies_in_plain_transformers(
    uri, policy, kind
):
    outcome = perform(start_worker(uri, CONFIG), loss_work(policy, kind))
    paths = [fetch_bundle(open_store(f"{uri}/run"), policy.weights), fetch_part(uri, outcome, "weights")]
    start, end = (AutoModelForCausalLM.from_pretrained(path).eval() for path in paths)
    tokenizer, pairs = tokenizer_of(uri, policy), load_preferences(PREFERENCES, DATA, split="heldout", seed=3)

    def log_ratio(prompt: str, completion: str) -> float:
        return completion_logprob(end, tokenizer, prompt, completion) - completion_logprob(
            start, tokenizer, prompt, completion
        )

    ratios = [[log_ratio(pair.prompt, text) for text in (pair.chosen, pair.rejected)] for pair in pairs]
    if kind == "ipo":
        lengths = [[len(tokenizer(text)["input_ids"]) + 1 for text in (pair.chosen, pair.rejected)] for pair in pairs]
        margins = [r[0] / n[0] - r[1] / n[1] for r, n in zip(ratios, lengths, strict=True)]
        losses = [(margin - 5) ** 2 for margin in margins]
    else:
        others = zip(pairs, [*pairs[1:], pairs[0]], strict=True)
        mismatched = [log_ratio(pair.prompt, text) for pair, other in others for text in (other.chosen, other.rejected)]
        point = max(0.0, sum(mismatched) / len(mismatched))
        assert outcome.metrics["heldout_reference_point"] == pytest.approx(point, abs=1e-4)
        margins = [0.1 * (chosen - rejected) for chosen, rejected in ratios]
        values = [(expit(0.1 * (chosen - point)), expit(0.1 * (point - rejected))) for chosen, rejected in ratios]
        losses = [(1.2 * (1 - desirable) + 1 - undesirable) / 2 for desirable, undesirable in values]
    assert abs(sum(margins)) > 1e-3
    assert sum(margins) / len(margins) == pytest.approx(outcome.metrics["heldout_margin"], abs=1e-4)
    assert sum(losses) / len(losses) == pytest.approx(outcome.metrics["heldout_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("simpo", 7),  # six steps and the held-out pairs
        pytest.param("orpo", 7, marks=pytest.mark.thorough),
        pytest.param("cpo", 7, marks=pytest.mark.thorough),
        pytest.param("ipo", 14, marks=pytest.mark.thorough),  # also log-probs of the reference for all of them
        ("kto", 28),  # also the same for prompts with completions of other prompts
    ],
)
def test_losses_without_a_reference_run_no_forward_passes_for_it(uri, policy, kind, expected, monkeypatch):
    passes = []
    forward = Trainer.forward
    monkeypatch.setattr(Trainer, "forward", lambda *given, **named: passes.append(1) or forward(*given, **named))
    perform(start_worker(uri, change(CONFIG, microbatch_tokens=99_999)), loss_work(policy, kind))
    assert len(passes) == expected


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("kto", {"reference_point", "desirable_reward", "undesirable_reward"}), ("orpo", {"nll"}), ("simpo", set())],
)
def test_training_with_any_loss_raises_the_accuracy_on_held_out_pairs(uri, policy, kind, extra):
    outcome = start_worker(uri, ROOMY).prefer(loss_work(policy, kind, steps=100, learning_rate=5e-3))
    common = {"loss_first", "loss_last", "accuracy", "margin", "heldout_loss", "heldout_accuracy", "heldout_margin"}
    counts = {"steps", "samples", "pairs", "heldout_pairs"}
    assert {*outcome.metrics} == common | counts | extra | {f"heldout_{name}" for name in extra}
    assert outcome.metrics["heldout_accuracy"] > 0.7
    assert outcome.metrics["loss_last"] < outcome.metrics["loss_first"]


def write_pairs(path: Path) -> FilePreferences:
    """Write preference pairs with completions of different lengths, and return the settings that read the pairs."""
    rows = [
        {"prompt": f"{row}+1=", "chosen": "1" * (1 + row % 7), "rejected": "2" * (1 + row % 5)} for row in range(40)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return FilePreferences(path=path, heldout_fraction=0.4)


def test_the_cross_entropy_of_cpo_is_the_mean_over_all_chosen_tokens_in_plain_transformers(uri, policy, tmp_path):
    preferences = write_pairs(tmp_path / "pairs.jsonl")
    work = dpo_work(policy, change(DPO, loss=LOSSES["cpo"]), preferences)
    outcome, other = (perform(start_worker(uri, change(CONFIG, microbatch_tokens=size)), work) for size in (99_999, 1))
    assert_alike(uri, outcome, other)
    model = AutoModelForCausalLM.from_pretrained(fetch_part(uri, outcome, "weights")).eval()
    tokenizer, pairs = tokenizer_of(uri, policy), load_preferences(preferences, DATA, split="heldout", seed=3)
    lengths = [len(tokenizer(pair.chosen)["input_ids"]) + 1 for pair in pairs]
    assert len({*lengths}) > 3
    total = sum(completion_logprob(model, tokenizer, pair.prompt, pair.chosen) for pair in pairs)
    assert outcome.metrics["heldout_nll"] == pytest.approx(-total / sum(lengths), abs=1e-4)


def scores_of(uri: str, outcome: Outcome, template: str | None) -> tuple[list[float], list[float]]:
    """Return the scores of the chosen and the rejected held-out completions by the worker of the reward."""
    reward = load_reward_model(fetch_part(uri, outcome, "weights"))
    pairs = load_preferences(PREFERENCES, DATA, split="heldout", seed=3)
    texts = [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    encoded = [encode(reward.tokenizer, template, prompt=prompt, completion=text) for prompt, text in texts]
    found = score(reward, encoded, batch_tokens=400, on_pass=lambda rows, seconds: None)
    values = [scored.value for scored in found]
    return values[::2], values[1::2]


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("template", [TEMPLATE, "{completion}", None])
def test_a_trained_reward_model_gives_the_scores_of_its_training(uri, policy, template):
    outcome = start_worker(uri, ROOMY).train_reward_model(reward_work(policy, template=template))
    chosen, rejected = scores_of(uri, outcome, template)
    margins = [better - worse for better, worse in zip(chosen, rejected, strict=True)]
    assert sum(margins) / len(margins) == pytest.approx(outcome.metrics["heldout_margin"], abs=1e-4)
    right = sum(margin > 0 for margin in margins) / len(margins)
    assert right == pytest.approx(outcome.metrics["heldout_accuracy"])


def test_a_text_that_ends_in_padding_is_scored_at_the_same_token_as_in_training(uri, policy, tmp_path):
    """Return a tokenizer whose EOS token is its padding token, so that a classifier ignores the last token."""
    outcome = start_worker(uri, ROOMY).train_reward_model(reward_work(padded_by_eos(uri, policy, tmp_path / "eos")))
    chosen, rejected = scores_of(uri, outcome, TEMPLATE)
    margin = sum(chosen) / len(chosen) - sum(rejected) / len(rejected)
    assert margin == pytest.approx(outcome.metrics["heldout_margin"], abs=1e-4)


def padded_by_eos(uri: str, policy: ModelVersion, copy: Path) -> ModelVersion:
    store = open_store(f"{uri}/run")
    shutil.copytree(fetch_bundle(store, policy.weights), copy)
    (copy / "bundle.json").unlink(missing_ok=True)
    stated = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(stated | {"pad_token": "<|eos|>"}))
    return ModelVersion(0, publish_bundle(store, copy, prefix="policies"))


@pytest.mark.thorough
def test_centering_keeps_rewards_around_zero(uri, policy):
    long = change(TRAINING, steps=40)
    free, held = (
        start_worker(uri, ROOMY).train_reward_model(reward_work(policy, change(long, centering=factor)))
        for factor in (0.0, 1.0)
    )
    middles = []
    for outcome in (free, held):
        chosen, rejected = scores_of(uri, outcome, TEMPLATE)
        middles.append(sum(abs(a + b) for a, b in zip(chosen, rejected, strict=True)) / len(chosen))
    assert middles[1] < 0.5 * middles[0]


def test_gradients_that_are_not_finite_are_refused(uri, policy):
    with pytest.raises(Quarantined, match=r"gradient norm is .* finite"):
        start_worker(uri).train_reward_model(reward_work(policy, change(TRAINING, learning_rate=1e30)))
