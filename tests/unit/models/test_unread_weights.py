"""Stored weights that config.json does not describe are named in the plan of a run."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rheostat.models.inspection.directory import inspect_directory
from rheostat.models.modeling.policy import load_policy, load_weights
from rheostat.models.modeling.unread_weights import collect_unread_weights
from tests.support.model_files import change_files, set_tensors
from tests.support.policies import write_policy

VALUE_HEAD = {"v_head.summary.weight": torch.zeros(1, 16), "v_head.summary.bias": torch.zeros(1)}
SINGLE = "model.safetensors"


@pytest.fixture
def policy(tmp_path):
    write_policy(tmp_path / "policy", "qwen3")
    return tmp_path / "policy"


@pytest.mark.parametrize(
    ("changes", "report"),
    [
        ({}, None),
        (
            {SINGLE: {"lm_head.bias": torch.zeros(300)}},
            f"the weight lm_head.bias in {SINGLE} is not read, because Qwen3ForCausalLM with this config.json has no "
            "such weights",
        ),
        ({SINGLE: VALUE_HEAD}, f"2 weights (v_head.summary.bias, v_head.summary.weight) in {SINGLE} are not read"),
        (
            {SINGLE: {f"model.layers.{number}.extra.weight": torch.zeros(1) for number in (10, 9, 8, 7)}},
            "4 weights (model.layers.7.extra.weight, model.layers.8.extra.weight, model.layers.9.extra.weight and 1 "
            "more)",
        ),
        (
            {"config.json": {"num_hidden_layers": 1, "layer_types": ["full_attention"]}},
            "weights (model.layers.1.",
        ),
        ({SINGLE: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}}, None),
    ],
    ids=["complete", "one", "value head", "four", "fewer layers", "buffer of old versions"],
)
def test_weights_that_config_json_does_not_describe_are_reported_once(policy, changes, report):
    change_files(policy, changes)
    with collect_unread_weights() as reports:
        inspect_directory(policy, is_trained=True)
    assert len(reports) == (report is not None)
    assert report is None or (report in reports[0] and str(policy) in reports[0])


def test_unread_weights_of_a_reward_model_are_reported_with_its_class(policy):
    scored = {"score.weight": torch.zeros(1, load_policy(policy).config.hidden_size), "lm_head.bias": torch.zeros(1)}
    set_tensors(policy / SINGLE, scored)
    change_files(policy, {"config.json": {"num_labels": 1}})
    with collect_unread_weights() as reports:
        load_weights(
            AutoModelForSequenceClassification, policy, what="reward model", device="meta", dtype=torch.float32
        )
    (report,) = reports
    assert f"reward model {policy}: 2 weights (lm_head.bias, lm_head.weight)" in report
    assert "Qwen3ForSequenceClassification" in report


def test_weights_are_loaded_without_a_report_outside_of_the_check(policy):
    change_files(policy, {SINGLE: VALUE_HEAD})
    assert "v_head.summary.weight" not in load_policy(policy).state_dict()
