"""Losses of episodes, whose observations are not trained on: the gradients equal those that TRL's code computes."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.corrections import MaskedImportance, NoCorrection, TruncatedImportance
from rheostat.models.config.divergence import NoKl
from rheostat.models.config.policy_losses import (
    Cispo,
    ConstantMean,
    Gmpo,
    Gspo,
    PpoClip,
    Sapo,
    SequenceMean,
    TokenMean,
    Vespo,
)
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from rheostat.models.text.tokenizer import load_tokenizer
from tests.support.update_workers import UNCLIPPED, change, gradients, read_rows, start_worker, update_work, with_rows

if TYPE_CHECKING:
    from trl import GRPOTrainer

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # TRL takes seconds to import, and warns

LONGEST, LOW, HIGH = 30, 0.05, 0.06
CLIPS = {"clip_low": LOW, "clip_high": HIGH}
TEMPERATURES = {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 4.0}
KERNEL = {"k_pos": 1.5, "lambda_pos": 2.5, "k_neg": 0.5, "lambda_neg": 1.5}
CASES = {  # our loss, and TRL's settings
    "grpo": (PpoClip(aggregation=SequenceMean(), **CLIPS), {"loss_type": "grpo"}),
    "dapo": (PpoClip(aggregation=TokenMean(), **CLIPS), {"loss_type": "dapo"}),
    "dr_grpo": (PpoClip(aggregation=ConstantMean(length=LONGEST), **CLIPS), {"loss_type": "dr_grpo"}),
    "dual clip": (PpoClip(aggregation=TokenMean(), dual_clip=1.1, **CLIPS), {"loss_type": "bnpo", "delta": 1.1}),
    "gspo": (
        Gspo(aggregation=SequenceMean(), **CLIPS),
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "cispo": (Cispo(aggregation=TokenMean(), clip_high=HIGH), {"loss_type": "cispo", "epsilon_high": 1 + HIGH}),
    "sapo": (Sapo(positive_temperature=1.5, negative_temperature=4.0), {"loss_type": "sapo", **TEMPERATURES}),
    "gmpo": (Gmpo(**CLIPS), {}),
    "luspo": (
        Gspo(aggregation=ConstantMean(length=1), **CLIPS),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "vespo": (
        Vespo(positive_power=1.5, positive_decay=2.5, negative_power=0.5, negative_decay=1.5),
        {"loss_type": "vespo", **{f"vespo_{name}": value for name, value in KERNEL.items()}},
    ),
}


def mask_observations(uri: str, policy: ModelVersion, *, per_sequence: bool = False) -> UpdateWork:
    """Return work on samples with observations, which have no log-probs and no advantages, inside and at the end.
    With `per_sequence`, all completion tokens of a sample have the same advantage."""
    work = update_work(uri, policy)
    rows, rng = read_rows(uri, work), np.random.default_rng(7)
    for row in rows:
        observed = rng.random(len(row["staleness"])) < 0.4
        observed[0] = False  # the policy generates the first token
        if per_sequence:
            row["advantages"] = row["advantages"][:1] * len(observed)
        for name, instead in (("staleness", -1), ("logprobs", 0.0), ("advantages", 0.0)):
            row[name] = [instead if each else value for value, each in zip(row[name], observed, strict=True)]
    return with_rows(uri, work, rows)


def trl_trainer(directory: Path, rows: list[dict], out: Path, *, name: str = "", **settings: object) -> "GRPOTrainer":
    """Return TRL's trainer of a policy for the loss of this name, and add to the rows the columns that it reads."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    own = {"epsilon": LOW, "epsilon_high": HIGH, "temperature": 0.9, "beta": 0.0, "max_completion_length": LONGEST}
    batch = {"per_device_train_batch_size": len(rows), "num_generations": len(rows), "steps_per_generation": 1}
    trainer = (GMPOTrainer if name == "gmpo" else GRPOTrainer)(
        model=model,
        reward_funcs=lambda **_: [],
        args=GRPOConfig(
            output_dir=str(out), use_cpu=True, bf16=False, report_to="none", **{**own, **batch, **settings}
        ),
        train_dataset=Dataset.from_dict({"prompt": ["-"]}),
        processing_class=load_tokenizer(directory),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.eval()  # without dropout, as ours; what differs otherwise is accumulation, of which there is none
    for row in rows:
        split = row["num_prompt_tokens"]
        row |= {"prompt": row["tokens"][:split], "completion": row["tokens"][split:]}
        row |= {"tools": [int(each >= 0) for each in row["staleness"]]}
        row |= {"read": [1] * split, "written": [1] * len(row["completion"])}
    return trainer


def pad_rows(rows: list[dict], name: str, side: str = "right") -> torch.Tensor:
    return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_side=side)


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> np.ndarray:
    loss.backward()
    return np.concatenate([each.grad.numpy().ravel() for each in model.parameters()])


def trl_gradients(directory: Path, rows: list[dict], out: Path, *, name: str, **settings: object) -> np.ndarray:
    """Return the gradients that TRL's trainer computes for the same tokens, with its padding and its tool mask."""
    trainer, padded = trl_trainer(directory, rows, out, name=name, **settings), partial(pad_rows, rows)
    mask, tools = padded("written"), padded("tools")
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": padded("prompt", "left"),
            "prompt_mask": padded("read", "left"),
            "completion_ids": padded("completion"),
            "completion_mask": mask,
            "tool_mask": tools,
            "advantages": padded("advantages")[:, 0] if name == "gmpo" else padded("advantages"),
            "old_per_token_logps": padded("logprobs"),
            "num_items_in_batch": (mask * tools).sum(),
        },
    )
    return gradients_of(trainer.model, loss)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_episodes_is_that_of_trl_with_its_tool_mask(uri, policy, tmp_path, name):
    loss, settings = CASES[name]
    work, config = (
        mask_observations(uri, policy, per_sequence=name == "gmpo"),
        change(UNCLIPPED, loss=loss, correction=NoCorrection(), kl=NoKl()),
    )
    directory = fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    expected = trl_gradients(directory, read_rows(uri, work), tmp_path / "trl", name=name, **settings)
    assert np.abs(expected).max() > 1e-3
    for tokens in (9999, 90):  # one micro-batch, or many
        outcome = start_worker(uri, change(config, microbatch_tokens=tokens)).update(work)
        np.testing.assert_allclose(gradients(uri, outcome), expected, atol=1e-6)


def trl_corrected_gradients(directory: Path, rows: list[dict], out: Path, mode: str, low: float, high: float):
    """Return the gradients and the importance ratios (samples x completion tokens, or x 1) that TRL computes from the
    log-probs of its model and the recorded log-probs, as if vLLM had returned these completions."""
    trainer, padded = trl_trainer(directory, rows, out, loss_type="dapo"), partial(pad_rows, rows)
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = low, high
    trainer._calculate_rewards = lambda inputs, *_: torch.zeros(len(inputs), 1)
    generated = [[row[name] for row in rows] for name in ("prompt", "completion", "tools", "completion", "logprobs")]
    trainer._generate = lambda prompts: (*generated, {}, None, None)
    batch = trainer._generate_and_score_completions([{"prompt": "-"}] * len(rows))
    loss = trainer._compute_loss(trainer.model, batch | {"advantages": padded("advantages")})
    return gradients_of(trainer.model, loss), batch["importance_sampling_ratio"]


MIN_RATIO, MAX_RATIO = 0.8, 1.1
CORRECTIONS = {
    "token_truncate": (TruncatedImportance(cap=MAX_RATIO), None),
    "token_mask": (MaskedImportance(low=MIN_RATIO, high=MAX_RATIO), MIN_RATIO),
    "sequence_truncate": (TruncatedImportance(cap=MAX_RATIO, level="sequence"), None),
    "sequence_mask": (MaskedImportance(low=MIN_RATIO, high=MAX_RATIO, level="sequence"), MIN_RATIO),
}
"""Our correction and TRL's lower bound by TRL's `vllm_importance_sampling_mode`."""


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_the_gradient_with_an_importance_correction_is_that_of_trl(uri, policy, tmp_path, mode):
    correction, low = CORRECTIONS[mode]
    work, config = mask_observations(uri, policy), change(UNCLIPPED, correction=correction, kl=NoKl())
    directory = fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    expected, ratios = trl_corrected_gradients(directory, read_rows(uri, work), tmp_path / "trl", mode, low, MAX_RATIO)
    bounded = ratios == (MAX_RATIO if low is None else 0)
    assert 0.03 < float(bounded.float().mean()) < 0.9, "the bound has an effect on some of them"
    for tokens in (9999, 90):  # one micro-batch, or many
        outcome = start_worker(uri, change(config, microbatch_tokens=tokens)).update(work)
        np.testing.assert_allclose(gradients(uri, outcome), expected, atol=1e-6)
