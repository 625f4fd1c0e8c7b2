"""Stages of training on data alone are refused where they lack what they learn from."""

import pytest

from flows.cli.train import run_part
from infra.errors import BadInput
from tasks.config.run import load_config, override_config
from tests.support.jobs import ROOT

TRAINED = 'scoring.rewards=[{kind="numeric"},{kind="model",name="liked",model={kind="trained"}}]'
DIRECTORY = 'scoring.rewards=[{kind="model",name="liked",model={kind="directory",path="x"}}]'
PAIRS = "preferences.kind=arithmetic"


def refusal(*overrides: str) -> str:
    with pytest.raises(BadInput) as refused:
        override_config({}, overrides, source="run.toml")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_trained_reward_model_needs_preferences():
    assert "reward 'liked': a trained reward model learns from preferences, set [preferences]" in refusal(TRAINED)
    config = override_config({}, [TRAINED, PAIRS], source="run.toml")
    assert list(config.scoring.trained_reward_models) == ["liked"]


def test_dpo_needs_preferences():
    assert "dpo learns from preferences, set [preferences]" in refusal("dpo.steps=10")
    assert override_config({}, ["dpo.steps=10", PAIRS], source="run.toml").dpo.steps == 10


def test_preferences_that_nothing_learns_from_are_refused():
    assert "preferences: nothing learns from them" in refusal(PAIRS)
    assert "preferences: nothing learns from them" in refusal(PAIRS, DIRECTORY)


def test_arithmetic_pairs_need_arithmetic_problems():
    told = refusal(PAIRS, "dpo.steps=10", "data.kind=file", "data.path=problems.jsonl")
    assert "preferences.kind 'arithmetic' with data.kind 'file'" in told
    own = ("preferences.kind=file", "preferences.path=pairs.jsonl")
    assert override_config({}, [*own, "dpo.steps=10", "data.kind=file", "data.path=p.jsonl"], source="run.toml").dpo


@pytest.mark.parametrize(
    ("command", "told"),
    [("sft", r"set \[warmup\]"), ("dpo", r"set \[dpo\] and \[preferences\]"), ("reward-model", "trains no reward")],
)
def test_a_part_that_the_job_does_not_have_is_refused(command, told, tmp_path):
    config = override_config({"store": str(tmp_path / "runs")}, [], source="run.toml")
    with pytest.raises(BadInput, match=told):
        run_part(command, config)
    assert not (tmp_path / "runs").exists()


def test_the_chain_from_warm_up_to_reinforcement_is_one_configuration():
    config = load_config(ROOT / "configs/rlhf.toml")
    assert config.warmup is not None
    assert list(config.scoring.trained_reward_models) == ["model"]
    assert {term: reward.weight for term, reward in zip(config.scoring.terms, config.scoring.rewards, strict=True)} == {
        "numeric": 0,
        "model": 1,
    }


def test_dpo_is_one_configuration_without_an_iteration():
    config = load_config(ROOT / "configs/dpo.toml")
    assert config.warmup is not None and config.dpo is not None
    assert config.iterations == 0
