"""Algorithms, losses and rollouts that do not go together are refused with the reason."""

import pytest

from models.config.optimizers import Adam8bit
from tests.support.configurations import accepted, refusal

KEEP = ("rollout.dynamic.surplus=keep",)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_what_compares_a_group_needs_two_completions(kind):
    told = refusal(f"algorithm.kind={kind}", "rollout.group_size=1")
    assert f"rollout.group_size 1: {kind} compares the completions of a group, use at least 2" in told


@pytest.mark.parametrize("kind", ["ppo", "reinforce_pp"])
def test_one_completion_per_prompt_is_enough_where_no_group_is_compared(kind):
    assert accepted(f"algorithm.kind={kind}", "rollout.group_size=1").rollout.group_size == 1


@pytest.mark.parametrize("kind", ["ppo", "reinforce_pp"])
def test_dynamic_sampling_is_refused_where_every_group_teaches(kind):
    assert f"rollout.dynamic with algorithm.kind {kind!r}" in refusal(f"algorithm.kind={kind}", *KEEP)
    assert accepted("algorithm.kind=rloo", *KEEP).rollout.dynamic is not None


def test_uninformative_groups_are_not_both_kept_and_left_out():
    told = refusal("algorithm.kind=grpo", "algorithm.keep_uninformative=true", *KEEP)
    assert "set rollout.dynamic.on_shortfall='fill'" in told


def test_the_divergence_is_penalised_once():
    told = refusal("algorithm.kind=grpo", "algorithm.kl.coefficient=0.1", "update.kl.kind=k3")
    assert "algorithm.kl and update.kl: the divergence would be penalised twice" in told
    assert accepted("algorithm.kind=reinforce_pp", "update.kl.kind=k3").update.kl.kind == "k3"


@pytest.mark.parametrize("part", ["kl.coefficient=0.1", "overlong.buffer=4"])
def test_penalties_have_no_place_among_terms_that_are_normalised_one_by_one(part):
    told = refusal("algorithm.kind=grpo", "algorithm.combine=normalise_then_sum", f"algorithm.{part}")
    assert "with combine 'normalise_then_sum'" in told


def test_the_overlong_buffer_lies_inside_the_limit():
    assert "expected less than max_new_tokens 64" in refusal("algorithm.kind=grpo", "algorithm.overlong.buffer=64")


def test_optimizers_that_need_whole_matrices_or_own_blocks_are_refused_where_ranks_hold_other_parts():
    told = refusal("update.optimizer.kind=muon", "update.zero_stage=1")
    assert "update.optimizer.kind 'muon' with update.zero_stage 1: use at most 0, or kind = 'adamw'" in told
    told = refusal("update.optimizer.kind=muon", "update.dtype=bfloat16")
    assert "'muon' with update.dtype 'bfloat16', which ZeRO-2 holds: use dtype = 'float32', or kind = 'adamw'" in told
    assert "with update.zero_stage 3: use at most 2" in refusal("update.optimizer.kind=adam8bit", "update.zero_stage=3")
    eight = accepted("update.optimizer.kind=adam8bit", "update.dtype=bfloat16")
    assert eight.update.running_stage == 2


def test_an_optimizer_whose_package_is_missing_is_refused_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(Adam8bit, "package", ("no_such_bits", "no-such-bits>=1"))
    told = refusal("update.optimizer.kind=adam8bit")
    assert "expected the package no_such_bits, found none; pip install 'no-such-bits>=1'" in told


def test_an_optimizer_whose_package_would_load_code_from_a_hub_is_refused(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    told = refusal("update.optimizer.kind=adam8bit")
    assert "'adam8bit' beside the package kernels: compiled code of a hub would be loaded through it" in told


FLASH = ("update.attention=flash_attention_2", "update.dtype=bfloat16", "pools.gpus_per_update_rank=1")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((*FLASH, "update.dtype=float32"), "with update.dtype 'float32': flash kernels know 16 bits alone"),
        ((*FLASH, "pools.gpus_per_update_rank=0"), "flash kernels need a GPU, update ranks have none"),
        (FLASH, "expected the package flash-attn, 2.6 or later, found none; pip install --no-build-isolation"),
        ((*FLASH, "update.attention=flash_attention_3"), "expected the package flash-attn-3, 3.0 or later, found none"),
        (["update.attention=flash_attention"], "did you mean 'flash_attention_"),
        (["update.attention=sdp"], "did you mean 'sdpa'?"),
    ],
)
def test_attention_that_cannot_be_computed_so_is_refused(overrides, reason):
    assert reason in refusal(*overrides)


def test_a_flash_kernel_may_be_there_in_a_cluster_that_runs_elsewhere(tmp_path, monkeypatch):
    assert accepted(*FLASH, "pools.ray_address=10.0.0.1:6379").update.attention == "flash_attention_2"
    for version, fits in (("2.5.9", False), ("2.8.3", True)):
        monkeypatch.syspath_prepend(tmp_path / version)
        (tmp_path / version / "flash_attn.dist-info").mkdir(parents=True)
        (tmp_path / version / "flash_attn.dist-info" / "METADATA").write_text(f"Name: flash-attn\nVersion: {version}\n")
        if fits:
            assert accepted(*FLASH).update.wide_attention is None
        else:
            assert "2.6 or later, found 2.5.9" in refusal(*FLASH)


def test_a_plain_policy_gradient_takes_one_step():
    assert "nothing corrects for steps taken before" in refusal("update.loss.kind=policy_gradient")
    assert accepted("update.loss.kind=policy_gradient", "update.minibatches=1").update.minibatches == 1


def test_ratios_of_sequences_are_not_taken_against_another_arithmetic():
    assert "compare with the trainer's own log-probs" in refusal("update.loss.kind=gspo", "update.correction.kind=none")


def test_dual_clip_lies_beyond_the_upper_bound():
    told = refusal("update.loss.kind=ppo_clip", "update.loss.clip_high=0.5", "update.loss.dual_clip=1.4")
    assert "expected more than 1 + clip_high = 1.5" in told


@pytest.mark.parametrize("override", ["update.max_staleness=1", "update.stale_correction.kind=masked"])
def test_staleness_is_not_corrected_where_there_is_none(override):
    assert "no token is ever stale without rollout.staleness, rollout.partial or" in refusal(override)
    accepted(override, *KEEP)
    accepted(override, "rollout.partial.tokens=8")
    accepted(override, "rollout.staleness=1", "retention.keep_last=3")


def test_a_critic_that_warms_up_to_the_end_is_refused():
    told = refusal("algorithm.kind=ppo", "algorithm.critic.warmup_iterations=3", "iterations=3")
    assert "the policy would never learn in 3 iterations" in told


def test_rewards_without_weight_teach_nothing():
    assert "every weight is 0" in refusal('scoring.rewards=[{kind="numeric", weight=0}]')
    assert accepted('scoring.rewards=[{kind="numeric", weight=0}]', "iterations=0").iterations == 0


TEACHER = "algorithm.distillation.teacher"

HELD = (f"{TEACHER}.kind=directory", f"{TEACHER}.path=somewhere")

ASKED = (
    f"{TEACHER}.kind=endpoint",
    f"{TEACHER}.base_url=https://teacher.example.com/v1",
    f'{TEACHER}.allowed_hosts=["teacher.example.com"]',
    f"{TEACHER}.model=large",
)


def test_distillation_alone_needs_a_teacher_and_no_reward_that_counts():
    weightless = 'scoring.rewards=[{kind="numeric", weight=0}]'
    assert "algorithm.distillation: missing" in refusal("algorithm.kind=distillation")
    assert accepted("algorithm.kind=distillation", weightless, *HELD).algorithm.distillation.coefficient == 1
    assert "algorithm.overlong with algorithm.kind 'distillation'" in refusal(
        "algorithm.kind=distillation", "algorithm.overlong.buffer=4", *HELD
    )


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp", "ppo", "capo"])
def test_any_algorithm_takes_a_teacher_beside_its_rewards(kind):
    rewards = 'scoring.rewards=[{kind="numeric", weight=2}, {kind="target", target="a:b", per="step"}]'
    assert accepted(f"algorithm.kind={kind}", rewards, *HELD).algorithm.distillation is not None


def test_a_teacher_behind_an_endpoint_answers_at_temperature_1():
    told = refusal("algorithm.kind=grpo", "rollout.sampling.temperature=0.7", *ASKED)
    assert "temperature 0.7: a teacher behind an endpoint answers at temperature 1" in told
    assert accepted("algorithm.kind=grpo", *ASKED).algorithm.distillation is not None
    assert accepted("algorithm.kind=grpo", "rollout.sampling.temperature=0.7", *HELD).algorithm.distillation is not None


def test_a_request_to_a_teacher_ends_before_it_counts_as_stalled():
    told = refusal("algorithm.kind=grpo", "pools.stall_seconds=200", *ASKED)
    assert (
        "algorithm.distillation.teacher.timeout_seconds 120 and a pause of 90 s reach pools.stall_seconds 200" in told
    )


def test_tokens_of_a_paced_engine_have_no_teacher():
    assert "mean nothing to a teacher" in refusal(
        "algorithm.kind=grpo", "rollout.engine.kind=target", "rollout.engine.target=bench.paced:PacedEngine", *HELD
    )


NUMERIC = "{kind = 'numeric', weight = 2.0}"

FLAGS = "{kind = 'target', target = 'models.rewards.arithmetic_steps:wrong_steps', per = 'step'}"


def test_capo_needs_a_reward_of_steps():
    told = refusal("algorithm.kind=capo", f"scoring.rewards=[{NUMERIC}]")
    assert "algorithm.kind 'capo': expected a reward that values steps or tokens" in told


def test_capo_needs_an_outcome():
    told = refusal("algorithm.kind=capo", f"scoring.rewards=[{FLAGS}]")
    assert "algorithm.kind 'capo': expected a reward of whole completions" in told


@pytest.mark.parametrize("weight", ["1.0", "0.5"])
def test_a_flagged_token_of_a_right_answer_does_not_fall_to_a_wrong_answers_level(weight):
    rewards = f"scoring.rewards=[{{kind = 'numeric', weight = {weight}}}, {FLAGS}]"
    told = refusal("algorithm.kind=capo", rewards)
    assert f"outcomes weigh {float(weight):g} and flags 1, so a flagged token of a right answer falls" in told
    assert accepted("algorithm.kind=capo", rewards, "algorithm.allow_low_outcome=true").scoring.terms


def test_capo_with_outcomes_above_flags_is_accepted():
    config = accepted("algorithm.kind=capo", f"scoring.rewards=[{NUMERIC}, {FLAGS}]")
    assert config.scoring.process_terms == ("target",)


DRAWING = (
    "data.kind=paintings",
    "policy.kind=scratch_diffusion",
    "rollout.denoising.steps=6",
    "rollout.engine.kind=diffusers",
    "scoring.rewards=[{kind='painting'}]",
)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("rollout.partial.tokens=2", "rollout.partial with policy.kind 'scratch_diffusion', which draws: a picture is"),
        ("rollout.dynamic.surplus=keep", "rollout.dynamic.surplus 'keep' with policy.kind"),
        ("algorithm.kind=ppo", "algorithm.critic with policy.kind 'scratch_diffusion', which draws: critics read text"),
        ("update.loss.kind=gspo", "update.loss.kind 'gspo' with policy.kind"),
        ("update.attention=eager", "update.attention with policy.kind"),
        ("update.router_replay=rollout", "update.router_replay with rollout.engine.kind 'diffusers'"),
        ("policy={kind='diffusion', path='x'}", "warmup with policy.kind 'diffusion': it comes trained as it is"),
        ("data.kind=arithmetic", "warmup: data.kind 'arithmetic' has no pictures to imitate, remove [warmup]"),
        ("rollout.group_size=1", "grpo compares the completions of a group, use at least 2"),
        ("scoring.rewards=[{kind='numeric'}]", "reward 'numeric' looks at no picture, with policy.kind"),
        ("rollout.engine.kind=transformers", "rollout.engine.kind 'transformers' with policy.kind 'scratch_diffusion'"),
        ("policy.kind=scratch", "rollout.denoising: policy.kind 'scratch' writes text"),
        ("rollout.denoising.window={size=3, last=4}", "window.last 4 and window.size 3: the window would end behind"),
    ],
)
def test_what_does_not_go_with_a_policy_that_draws_is_refused_in_a_line(key, told):
    name = key.partition("=")[0]
    others = [each for each in (*DRAWING, "warmup.steps=1") if not f"{each.partition('=')[0]}.".startswith(f"{name}.")]
    assert told in refusal(*others, key)


def test_a_policy_that_draws_says_how_and_its_samples_differ_without_noise():
    told = refusal(*(each for each in DRAWING if "denoising" not in each))
    assert "which draws: expected [rollout.denoising]" in told
    assert accepted(*DRAWING, "evaluation.samples=8").evaluation.temperature == 0
    assert "samples 8 at temperature 0 are all the same" in refusal("evaluation.samples=8")
