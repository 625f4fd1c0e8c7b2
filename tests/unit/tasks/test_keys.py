"""Keys of manifests, which name a stage of an iteration, an evaluation or a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.tasks.run.keys import (
    BASE,
    DPO,
    PROMPTS,
    SFT,
    StageKey,
    evaluation_key,
    iteration_key,
    reward_model_role,
)

NUMBERS = st.integers(0, 10**6)
TERMS = st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True)
STAGES = st.sampled_from(["plan", "rollout", "scoring", "credit", "estimates", "update", "seal", "summary"])
NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True).filter(lambda name: ".." not in name)
PREFIXES = st.just("") | st.builds(
    lambda kind, name: f"{kind}/{name}/", st.sampled_from(["rescore", "recredit"]), NAMES
)

REAL = (
    "critic/initial", "eval-0000/plan", "eval-0000/rollout/0000", "eval-0000/scoring/0000", "eval-0000/summary",
    "it-0001/credit", "it-0001/estimates", "it-0001/judge-judge/0000", "it-0001/plan", "it-0001/rollout/0002",
    "it-0001/scoring/0002", "it-0001/seal", "it-0001/update", "it-0002/wave-2/plan", "it-0002/wave-2/rollout/0001",
    "judge-judge/base", "judge-judge/model", "policy/base", "policy/base/eval-0000/plan", "policy/dpo",
    "policy/dpo/eval-0000/rollout/0001", "policy/initial", "policy/sft", "policy/sft/eval-0000/summary",
    "prompts/heldout", "prompts/train", "recredit/own/it-0002/credit", "recredit/own/terms",
    "rescore/judged/it-0001/judge-judge/0001", "rescore/judged/judge-judge/base", "rescore/judged/terms",
    "rescore/own/it-0003/seal", "retention/53027346f4651033", "teacher/model",
)  # fmt: skip
"""Keys of the manifests of finished runs."""


@pytest.mark.parametrize("text", REAL)
def test_keys_of_finished_runs_are_parsed_and_written_unchanged(text):
    key = StageKey.parse(text)
    assert str(key) == text
    assert key.without_prefix.with_prefix(key.derived_prefix) == text


@given(
    number=NUMBERS,
    wave=st.integers(1, 100),
    stage=STAGES | TERMS.map(reward_model_role),
    shard=NUMBERS,
    prefix=PREFIXES,
)
def test_the_key_of_a_shard_has_its_iteration_wave_stage_and_prefix(number, wave, stage, shard, prefix):
    key = StageKey.of(iteration_key(number, wave), stage, shard).with_prefix(prefix)
    read = StageKey.parse(str(key))
    assert read == key
    assert (read.iteration, read.wave, read.stage, read.shard, read.derived_prefix) == (
        number,
        wave,
        stage,
        shard,
        prefix,
    )
    assert read.with_stage("scoring").with_stage(stage) == read
    assert read.without_prefix == StageKey.of(iteration_key(number, wave), stage, shard)
    with pytest.raises(ValueError, match="not contain the number of an evaluation"):
        _ = read.evaluation


@given(number=NUMBERS, stage=STAGES, prefix=PREFIXES)
def test_a_key_without_a_shard_number_names_a_whole_stage(number, stage, prefix):
    key = StageKey.parse(StageKey.of(iteration_key(number), stage).with_prefix(prefix))
    assert (key.iteration, key.wave, key.stage, key.shard) == (number, 1, stage, None)


@given(number=NUMBERS, policy=st.sampled_from(["", BASE, SFT, DPO]), stage=STAGES, shard=NUMBERS)
def test_the_key_of_an_evaluation_has_the_number_of_iterations_for_every_policy(number, policy, stage, shard):
    key = StageKey.parse(StageKey.of(evaluation_key(number, policy=policy), stage, shard))
    assert (key.evaluation, key.stage, key.shard) == (number, stage, shard)
    with pytest.raises(ValueError, match="not contain the number of an iteration"):
        _ = key.iteration


@given(number=st.integers(1, 10**6), term=TERMS, prefix=PREFIXES)
def test_models_have_separate_keys_before_the_first_iteration_and_keys_of_updates_later(number, term, prefix):
    assert [StageKey.policy(0), StageKey.critic(0)] == ["policy/initial", "critic/initial"]
    assert StageKey.policy(number) == StageKey.critic(number) == StageKey.of(iteration_key(number), "update")
    made = [
        *PROMPTS.values(),
        StageKey.teacher(0),
        StageKey.teacher(1),
        StageKey.reward_model(term),
        StageKey.reward_model(term, is_base=True),
    ]
    assert [StageKey.parse(key.with_prefix(prefix)) for key in made] == [f"{prefix}{key}" for key in made]
