"""Losses of preference pairs and their gradients, compared with those of TRL's trainers on the same log-probs."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from rheostat.infra.variants import implementation_of
from rheostat.models.config.preference_losses import (
    CpoLoss,
    DpoLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    PreferenceLoss,
    SimpoLoss,
)
from rheostat.models.objectives.preferences import PairScores, PairStatistics, PairTerms
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.sequences import SequencePair, mismatch_pairs

VOCABULARY = 13
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
)


def build_table(seed: int) -> Tensor:
    """Return the logits of a bigram model: one row per token, one column per next token."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2).double()


def build_pairs(lengths: list[tuple[int, int]], *, prompt: int) -> list[SequencePair]:
    """Return pairs of random tokens whose completions have these lengths, with prompts of `prompt` tokens."""
    generator = torch.Generator().manual_seed(5)

    def sample(size: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (size,), generator=generator).tolist()

    starts = [ModelInput.from_prompt(sample(prompt)) for _ in lengths]
    return [
        SequencePair(*(start.append_completion(sample(size)) for size in sizes))
        for start, sizes in zip(starts, lengths, strict=True)
    ]


def sum_logprobs(table: Tensor, each: ModelInput) -> Tensor:
    """Return the log-prob of a completion under a bigram model, or 0 for an input without a completion."""
    if not each:
        return table.new_zeros(())
    tokens, start = torch.tensor(each.tokens).long(), each.num_prompt_tokens
    logprobs = table.log_softmax(-1)[tokens[:-1], tokens[1:]]
    return logprobs[start - 1 :].sum()


def score_pairs(table: Tensor, pairs: list[SequencePair]) -> PairScores:
    chosen, rejected = ([getattr(pair, name) for pair in pairs] for name in ("chosen", "rejected"))
    scores = [torch.stack([sum_logprobs(table, each) for each in side]) for side in (chosen, rejected)]
    return PairScores(*scores, *(torch.tensor([len(each.completion) for each in side]) for side in (chosen, rejected)))


def compute_ours(config: PreferenceLoss, table: Tensor, reference: Tensor, pairs: list[SequencePair]) -> PairTerms:
    scores, baseline = score_pairs(table, pairs), score_pairs(reference, pairs)
    mismatched = mismatch_pairs(pairs, context=99)
    ours, theirs = (score_pairs(each, mismatched) for each in (table.detach(), reference))
    ratios = torch.cat([ours.chosen_P - theirs.chosen_P, ours.rejected_P - theirs.rejected_P])
    present = [[bool(getattr(pair, side)) for pair in pairs] for side in ("chosen", "rejected")]
    step = PairStatistics(
        scores.chosen_lengths_P.double().mean().item(),
        (ratios.sum() / sum(map(sum, present))).clamp(min=0),
        *(sum(each) / len(pairs) for each in present),
    )
    return implementation_of(config)(scores, baseline, step=step, config=config)


def pad_batch(inputs: list[ModelInput]) -> dict[str, Tensor]:
    """Return token ids, attention mask and completion mask of sequences, padded on the right."""
    width = max(map(len, inputs))
    ids, attention, completion = (torch.zeros(len(inputs), width, dtype=torch.long) for _ in range(3))
    for row, each in enumerate(inputs):
        ids[row, : len(each)] = torch.tensor(each.tokens)
        attention[row, : len(each)] = 1
        completion[row, each.num_prompt_tokens : len(each)] = 1
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


class BigramModel:
    """Model of one table of logits, called like a transformers model or like one with TRL's fused head."""

    training = True

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, input_ids: Tensor, labels: Tensor | None = None, **_: object) -> SimpleNamespace:
        logits = self.table[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        logprobs = logprobs * (labels[:, 1:] != -100)
        other = torch.zeros_like(logprobs)
        return SimpleNamespace(log_probs=logprobs, entropy=other, mean_logits=other, is_top1=other.bool())


def build_trainer(kind: type, model: BigramModel, **settings: object) -> SimpleNamespace:
    """Return a TRL trainer that has only the attributes that its loss reads."""
    trainer = kind.__new__(kind)
    defaults = {
        "model": model, "accelerator": ACCELERATOR, "aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1,
        "_metrics": {"train": defaultdict(list)}, "precompute_ref_logps": True, "is_encoder_decoder": False,
    }  # fmt: skip
    vars(trainer).update(defaults | settings)
    return trainer


def run_dpo_trainer(loss_type: str, beta: float, model: BigramModel, reference: Tensor, pairs) -> tuple[Tensor, float]:
    trainer = build_trainer(
        DPOTrainer, model, beta=beta, loss_types=[loss_type], loss_weights=[1.0], ld_alpha=None,
        f_divergence_type="reverse_kl", use_weighting=False, label_smoothing=0.0,
    )  # fmt: skip
    batch = pad_batch([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])
    scores = score_pairs(reference, pairs)
    batch |= {"ref_chosen_logps": scores.chosen_P, "ref_rejected_logps": scores.rejected_P}
    loss = trainer._compute_loss(model, batch, return_outputs=False)
    return loss, trainer._metrics["train"]["rewards/accuracies"][0]


def run_kto_trainer(config: KtoLoss, model: BigramModel, reference: Tensor, pairs) -> tuple[Tensor, dict[str, list]]:
    trainer = build_trainer(
        KTOTrainer, model, beta=config.beta, loss_type="kto", calculate_KL=True,
        desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight,
    )  # fmt: skip
    sides = [
        [each for each in (*(pair.chosen for pair in some), *(pair.rejected for pair in some)) if each]
        for some in (pairs, mismatch_pairs(pairs, context=99))
    ]
    batch = pad_batch(sides[0]) | {f"KL_{name}": value for name, value in pad_batch(sides[1]).items()}
    num_chosen = sum(bool(pair.chosen) for pair in pairs)
    batch["label"] = torch.tensor([True] * num_chosen + [False] * (len(sides[0]) - num_chosen))
    batch["ref_logps"], batch["ref_KL_logps"] = (
        torch.stack([sum_logprobs(reference, each) for each in side]) for side in sides
    )
    loss = trainer._compute_loss(model, batch, return_outputs=False)
    return loss, trainer._metrics["train"]


def run_pair_trainer(trainer: CPOTrainer | ORPOTrainer, model: BigramModel, pairs) -> tuple[Tensor, dict[str, float]]:
    """Return the loss and the metrics of one of TRL's trainers for pairs without a reference."""
    batch = {}
    for side in ("chosen", "rejected"):
        padded = pad_batch([getattr(pair, side) for pair in pairs])
        batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"] = padded["input_ids"], padded["attention_mask"]
        batch[f"{side}_labels"] = padded["input_ids"].masked_fill(padded["completion_mask"] == 0, -100)
    return trainer.get_batch_loss_metrics(model, batch)


def assert_same(ours: PairTerms, loss: Tensor, table: Tensor) -> None:
    """Check that both losses and their gradients with respect to the logits are equal."""
    assert ours.loss_P.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    gradients = [torch.autograd.grad(each, table)[0] for each in (ours.loss_P.mean(), loss)]
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


LENGTHS = [(3, 7), (5, 2), (1, 4)]


@pytest.mark.parametrize(("loss_type", "config"), [("sigmoid", DpoLoss(beta=0.3)), ("ipo", IpoLoss(tau=0.3))])
def test_dpo_and_ipo_are_those_of_trl(loss_type, config):
    table, reference, pairs = build_table(1).requires_grad_(), build_table(2), build_pairs(LENGTHS, prompt=3)
    loss, accuracy = run_dpo_trainer(loss_type, 0.3, BigramModel(table), reference, pairs)
    ours = compute_ours(config, table, reference, pairs)
    assert_same(ours, loss, table)
    if loss_type == "sigmoid":  # the rewards of TRL are not divided by lengths
        assert ours.right_P.double().mean().item() == pytest.approx(accuracy)


@pytest.mark.parametrize(("policy", "is_clamped"), [(3, False), (1, True)])
def test_kto_and_its_reference_point_are_those_of_trl(policy, is_clamped):
    table, reference, pairs = build_table(policy).requires_grad_(), build_table(2), build_pairs(LENGTHS, prompt=3)
    config = KtoLoss(beta=0.2, desirable_weight=1.3, undesirable_weight=0.7)
    assert (compare_with_kto_trainer(config, table, reference, pairs) == 0) is is_clamped


@pytest.mark.parametrize("labels", [[True, False, True], [False, False, True], [True, True, True], [False] * 3])
def test_kto_on_single_completions_with_labels_is_that_of_trl(labels):
    reference, config = build_table(2), KtoLoss(beta=0.2, desirable_weight=1.3, undesirable_weight=0.7)
    pairs = [
        SequencePair(pair.chosen, ModelInput()) if label else SequencePair(ModelInput(), pair.rejected)
        for pair, label in zip(build_pairs(LENGTHS, prompt=3), labels, strict=True)
    ]
    tables = [build_table(seed).requires_grad_() for seed in (1, 3, 4, 5, 6, 7)]
    points = [compare_with_kto_trainer(config, table, reference, pairs) for table in tables]
    assert min(points) == 0 < max(points), "some reference points should be at the bound and some not"


def compare_with_kto_trainer(config: KtoLoss, table: Tensor, reference: Tensor, pairs: list[SequencePair]) -> float:
    """Check that loss, gradients and metrics are those of TRL, and return the reference point."""
    loss, metrics = run_kto_trainer(config, BigramModel(table), reference, pairs)
    ours = compute_ours(config, table, reference, pairs)
    assert_same(ours, loss, table)
    [point] = metrics["kl"]
    assert ours.extra_P["reference_point"].tolist() == pytest.approx([point] * len(pairs))
    rewards = [metrics.get(f"rewards/{side}", [0.0])[0] for side in ("chosen", "rejected")]
    for name, reward in zip(("desirable_reward", "undesirable_reward"), rewards, strict=True):
        assert ours.extra_P[name].mean().item() == pytest.approx(reward, abs=1e-6)
    assert ours.margins_P.mean().item() == pytest.approx(rewards[0] - rewards[1], abs=1e-6)
    return point


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (
            CpoLoss(beta=0.3, label_smoothing=0.2, nll_weight=0.7),
            {"loss_type": "sigmoid", "label_smoothing": 0.2, "cpo_alpha": 0.7},
        ),
        (SimpoLoss(beta=0.3, margin=0.5), {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0}),
    ],
)
def test_cpo_and_simpo_are_those_of_trl(config, settings):
    table, pairs = build_table(1).requires_grad_(), build_pairs(LENGTHS, prompt=3)
    trainer = build_trainer(
        CPOTrainer,
        BigramModel(table),
        **{"beta": 0.3, "alpha": 0.0, "pad_token_id": 0, "label_smoothing": 0.0, **settings},
    )
    loss, metrics = run_pair_trainer(trainer, trainer.model, pairs)
    ours = compute_ours(config, table, table.detach(), pairs)
    assert_same(ours, loss, table)
    assert ours.margins_P.mean().item() == pytest.approx(metrics["rewards/margins"], rel=1e-5)
    assert ours.right_P.double().mean().item() == pytest.approx(metrics["rewards/accuracies"])
    if config.extra_metrics:
        assert ours.extra_P["nll"].mean().item() == pytest.approx(metrics["nll_loss"], rel=1e-5)


def test_orpo_is_that_of_trl_for_prompts_of_one_token_and_chosen_completions_of_one_length():
    """TRL also trains on the prompt, except its first token, and weights completions by their lengths."""
    table, pairs = build_table(1).requires_grad_(), build_pairs([(4, 7), (4, 2), (4, 5)], prompt=1)
    trainer = build_trainer(ORPOTrainer, BigramModel(table), beta=0.3, padding_value=0)
    loss, metrics = run_pair_trainer(trainer, trainer.model, pairs)
    ours = compute_ours(OrpoLoss(weight=0.3), table, table.detach(), pairs)
    assert_same(ours, loss, table)
    assert ours.extra_P["nll"].mean().item() == pytest.approx(metrics["nll_loss"], rel=1e-5)
    assert ours.margins_P.mean().item() == pytest.approx(metrics["log_odds_chosen"], rel=1e-4)
