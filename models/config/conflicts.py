"""Checks of settings that must fit together, and the part of a job's configuration on which the checks depend.
Torch-free.

Each algorithm, loss or engine reports the conflicts of its settings. This module adds the conflicts that belong to none
of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rheostat.infra.config import PoolsConfig
from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.attention import FLASH, KERNELS, describe_missing_package
from rheostat.models.config.corrections import TruncatedImportance
from rheostat.models.config.data import DataConfig
from rheostat.models.config.engines import EngineSettings
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import PolicySource
from rheostat.models.config.preferences import PreferencesConfig
from rheostat.models.config.references import find_reference_rules
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.config.training import DpoConfig, WarmupConfig


@dataclass(frozen=True, slots=True)
class JobParts:
    """Parts of a run's configuration whose settings must fit together. Implements the protocol
    `rheostat.models.config.job.Job`, against which the parts are written."""

    algorithm: Algorithm
    update: UpdateConfig
    rollout: RolloutConfig
    scoring: ScoringConfig
    pools: PoolsConfig
    iterations: int


def slot_engines(rollout: RolloutConfig | None, scoring: ScoringConfig) -> Iterator[tuple[str, EngineSettings, int]]:
    """Yield every inference engine that runs in worker slots, as (configuration key, settings of the engine, number of
    slots per worker). Models behind endpoints need no slots."""
    if rollout is not None:
        yield "rollout.engine", rollout.engine, 1
        dialogue = None if rollout.environment is None else rollout.environment.dialogue
        if dialogue is not None and dialogue.model.local_engine is not None:
            yield "rollout.environment.model.engine", dialogue.model.local_engine, 1
    for term, reward in scoring.hosted_rewards.items():
        if reward.engine is not None:
            yield f"reward {term!r}: model.engine", reward.engine, reward.slots


def find_conflicts(job: JobParts) -> Iterator[str]:
    """Yield one message for each invalid combination of settings in a job. Only the first message is shown to the
    user."""
    yield from job.algorithm.find_conflicts(job)
    yield from job.update.loss.find_conflicts(job)
    yield from job.update.optimizer.find_conflicts(job.update)
    yield from _find_update_conflicts(job)
    yield from _find_forward_process_conflicts(job)
    yield from _find_gpu_conflicts(job.pools)
    yield from _find_attention_conflicts(job.update, job.pools)
    yield from _find_staleness_conflicts(job.update, job.rollout)
    yield from _find_time_conflicts(job.rollout)
    yield from _find_curriculum_conflicts(job.rollout, job.scoring)
    yield from job.rollout.engine.find_conflicts(job)
    if job.update.router_replay is not None:
        yield from _find_replay_conflicts(job.rollout)
    if job.rollout.environment is not None:
        yield from job.rollout.environment.find_conflicts(job)
    elif job.scoring.environment_rewards:
        [term, *_] = job.scoring.environment_rewards
        yield f"reward {term!r} needs an environment, but none is set. Set [rollout.environment], or remove the reward"
    else:
        pairs = zip(job.scoring.terms, job.scoring.rewards, strict=True)
        for term in (term for term, reward in pairs if reward.granularity == "turn"):
            yield f"reward {term!r} with per = 'turn' scores the turns of episodes. Set [rollout.environment]"
    for name, engine, slots in slot_engines(job.rollout, job.scoring):
        yield from engine.find_placement_conflicts(name, gpus=slots * job.pools.gpus_per_worker, pools=job.pools)


def _find_update_conflicts(job: JobParts) -> Iterator[str]:
    """Yield one message for each setting of the update that does not fit the others or the algorithm."""
    if job.pools.update_ranks % job.update.sequence_parallel:
        yield (
            f"update.sequence_parallel is {job.update.sequence_parallel}, but it must be a divisor of "
            f"pools.update_ranks, which is {job.pools.update_ranks}"
        )
    yield from _find_reference_conflicts(job)
    if job.update.masks_low_entropy and job.update.loss.selection is not None:
        yield (
            f"update.top_entropy cannot be combined with update.loss.kind = {job.update.loss.label!r}, because it "
            "would mask most of the tokens that this loss selects. Remove one of them"
        )
    positive, terms = job.update.positive_nll, job.scoring.terms
    if positive is not None and positive.metric is not None and positive.metric not in terms:
        yield (
            f"update.positive_nll.metric is {positive.metric!r}, but it must be the name of a reward. Set it to "
            f"{' or '.join(map(repr, terms))}"
        )
    if job.algorithm.teacher_top_k and job.update.entropy is not None:
        yield (
            "update.entropy cannot be combined with algorithm.distillation.top_k, because a forward pass computes "
            "either entropies or the log-probs of the teacher's most probable tokens. Remove one of them"
        )
    for key, teacher in job.algorithm.all_teachers.items():
        if teacher.builds_prompts and job.rollout.environment is not None:
            setting = f"{key}.align = 'text'" if teacher.aligns_text else f"{key}.kind = 'policy'"
            yield (
                f"{setting} cannot be combined with rollout.environment, because the teacher's prompt is built from "
                "the problem and replaces only one prompt. Use another teacher, or remove rollout.environment"
            )


def _find_reference_conflicts(job: JobParts) -> Iterator[str]:
    """Yield one message for each rule of a changing reference that does not fit the other settings or rules."""
    rules = find_reference_rules(job.update, job.algorithm)
    for key, rule in rules.items():
        if rule.rule_key and job.update.lora is not None:
            yield (
                f"{key}.{rule.rule_key} cannot be combined with update.lora, because the earlier policy is used "
                "without adapters. Remove one of them"
            )
        if rule.ema_decay and job.rollout.denoising is not None:
            yield (
                f"{key}.ema_decay cannot be combined with rollout.denoising, because only the weights of language "
                f"models can be averaged. Use {key}.reset_every, or remove {key}.ema_decay"
            )
    for (first, rule), (second, other) in pairwise(rules.items()):
        if other.ema_decay is not None and rule != other:
            yield (
                f"{second}.ema_decay is {other.ema_decay:g}, but {first} has "
                f"{'no moving average' if rule.ema_decay is None else f'the decay {rule.ema_decay:g}'}, and a run "
                "stores one model for both. Set both to the same ema_decay, or remove one of them"
            )


def _find_gpu_conflicts(pools: PoolsConfig) -> Iterator[str]:
    """Yield one message for each number of GPUs that a worker slot or an update rank cannot use."""
    if pools.gpus_per_worker > 1 and pools.gpus_per_worker != int(pools.gpus_per_worker):
        yield (
            f"pools.gpus_per_worker is {pools.gpus_per_worker:g}, but a worker can have only a fraction of one GPU or "
            "a whole number of GPUs. Set it to a number up to 1, or to a whole number"
        )
    if pools.gpus_per_update_rank > 1:
        yield (
            f"pools.gpus_per_update_rank is {pools.gpus_per_update_rank:g}, but each update rank trains on one GPU. "
            "Set it to 1. To train on more GPUs, raise pools.update_ranks"
        )


def _find_forward_process_conflicts(job: JobParts) -> Iterator[str]:
    """Yield one message for each setting that does not work with a loss on finished pictures with new noise, or works
    only with such a loss."""
    update, sampler = job.update, None if job.rollout.denoising is None else job.rollout.denoising.sampler
    loss = f"update.loss.kind = {update.loss.label!r}"
    if not update.loss.uses_forward_process:
        if sampler is not None and sampler.is_deterministic:
            yield (
                f"rollout.denoising.sampler.kind is {sampler.label!r}, with which denoising steps have no log-probs, "
                f"but {loss} needs log-probs. Use another sampler such as 'cps', or the loss 'diffusion_nft'"
            )
        return
    if sampler is None:
        yield f"{loss} needs a text-to-image policy and [rollout.denoising]. Use another loss, such as 'ppo_clip'"
    elif not sampler.is_deterministic:
        yield (
            f"rollout.denoising.sampler.kind is {sampler.label!r}, but {loss} trains on finished pictures, which are "
            "stored only with 'ode'. Set rollout.denoising.sampler.kind = 'ode'"
        )
    if update.corrections != (TruncatedImportance(),):
        yield (
            f"{loss} uses no log-probs, so update.correction and update.stale_correction have no effect. Remove both "
            "keys"
        )


def find_image_generation_conflicts(
    policy: PolicySource, job: JobParts, *, warmup: WarmupConfig | None, data: DataConfig
) -> Iterator[str]:
    """Yield one message for each setting that does not work with a text-to-image policy, or works only with such a
    policy."""
    denoising, engine = job.rollout.denoising, job.rollout.engine
    if not policy.generates_images:
        if denoising is not None:
            yield (
                f"rollout.denoising needs a text-to-image policy, but policy.kind is {policy.label!r}. Remove it, "
                "or set policy.kind = 'diffusion'"
            )
        if engine.generates_images:
            yield (
                f"rollout.engine.kind = {engine.label!r} generates pictures, but policy.kind = {policy.label!r} "
                "generates text. Use another engine, such as 'transformers'"
            )
        return
    kind = f"policy.kind = {policy.label!r}"
    if denoising is None:
        yield f"{kind} generates pictures and needs [rollout.denoising] with its steps and sampler. Set it"
    if not engine.generates_images:
        yield f"rollout.engine.kind is {engine.label!r}, but {kind} generates pictures. Use 'diffusers'"
    if warmup is not None:
        yield from _find_warmup_conflicts(policy, data, warmup)
    rollout, update = job.rollout, job.update
    text_only_settings = {
        "rollout.partial": (rollout.partial is not None, "a picture cannot be continued later. Remove it"),
        "rollout.environment": (rollout.environment is not None, "a picture is a single turn. Remove it"),
        "rollout.dynamic.surplus = 'keep'": (
            rollout.dynamic is not None and rollout.dynamic.surplus == "keep",
            "all denoising states of surplus pictures would be stored too. Use 'requeue'",
        ),
        "algorithm.distillation": (job.algorithm.distillation is not None, "teachers read only text. Remove it"),
        "algorithm.critic": (job.algorithm.value_model is not None, "critics read only text. Use grpo"),
        f"algorithm.kind = {job.algorithm.label!r}": (
            job.algorithm.credits_steps,
            "the algorithm assigns credit to steps of a text. Use grpo",
        ),
        f"update.loss.kind = {update.loss.label!r}": (
            update.loss.compares_sequences or update.loss.needs_tokens,
            "the log-prob of a denoising step is already a mean. Use 'ppo_clip'",
        ),
        "update.entropy": (update.entropy is not None, "denoising steps have no entropy over a vocabulary. Remove it"),
        "update.positive_nll": (
            update.positive_nll is not None,
            "a denoising step has no likelihood of a text. Remove it",
        ),
        "update.top_entropy": (
            update.top_entropy is not None,
            "denoising steps have no entropy over a vocabulary. Remove it",
        ),
        "the level or veto of update.correction or update.stale_correction": (
            any(each.compares_sequences for each in update.corrections),
            "the log-prob of a denoising step is already a mean. Set level = 'token' and no veto",
        ),
        "update.router_loss": (update.router_loss is not None, "denoisers have no experts. Remove it"),
        "update.sequence_parallel": (update.sequence_parallel > 1, "their micro-batches cannot be split. Set it to 1"),
        "update.attention": (update.attention not in (None, "auto"), "diffusers selects the attention. Remove it"),
        "update.freeze": (bool(update.freeze), "only the denoiser is trained anyway. Remove it"),
    }
    where = f"cannot be combined with {kind}, which generates pictures"
    yield from (f"{name} {where}: {reason}" for name, (is_set, reason) in text_only_settings.items() if is_set)
    for term, reward in zip(job.scoring.terms, job.scoring.rewards, strict=True):
        if reward.scores_parts:
            yield (
                f"reward {term!r} scores steps of a text, but {kind} generates pictures. Use a reward that scores "
                "whole pictures"
            )
        if not reward.uses_images:
            yield (
                f"reward {term!r} does not receive the pictures that {kind} generates. Use 'clip', 'clip_model', a "
                "judge with images = 'prompt', or a target with a parameter `images`"
            )


def _find_warmup_conflicts(policy: PolicySource, data: DataConfig, warmup: WarmupConfig) -> Iterator[str]:
    if warmup.chats is not None:
        yield f"warmup.chats trains on texts, but policy.kind = {policy.label!r} generates pictures. Remove chats"
    if policy.picture_side is None:
        yield f"policy.kind = {policy.label!r} is already trained and needs no warm-up. Remove [warmup]"
    elif not data.pictures:
        yield f"[warmup] needs pictures to imitate, but data.kind = {data.label!r} has none. Remove [warmup]"


def _find_attention_conflicts(update: UpdateConfig, pools: PoolsConfig) -> Iterator[str]:
    """Yield one message for each reason why the flash attention kernel in `update.attention` cannot run. The packages
    that are installed on a remote Ray cluster are not checked."""
    if update.attention not in KERNELS:
        return
    name = f"update.attention = {update.attention!r}"
    if update.dtype == "float32":
        yield (
            f"{name} cannot be combined with update.dtype = 'float32', because flash kernels need 16-bit numbers. Set "
            "update.dtype = 'bfloat16', or update.attention = 'sdpa'"
        )
    if not pools.gpus_per_update_rank:
        yield (
            f"{name} needs a GPU, but update ranks have none. Set pools.gpus_per_update_rank, or "
            "update.attention = 'sdpa'"
        )
    package = FLASH.get(update.attention)
    if package and pools.ray_address is None and (reason := describe_missing_package(package)) is not None:
        yield f"{name}: {reason}"


def _find_time_conflicts(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.environment is None and rollout.partial is not None and rollout.partial.iteration_seconds is not None:
        yield (
            "rollout.partial.iteration_seconds is set, but it only cuts episodes, and no environment is set. Remove it "
            "(rollout.partial.tokens cuts other completions), or set [rollout.environment]"
        )


def _find_curriculum_conflicts(rollout: RolloutConfig, scoring: ScoringConfig) -> Iterator[str]:
    """Yield one message for each reason why the solve rates of prompts are unknown, which the curriculum needs."""
    if rollout.curriculum is None:
        return
    if rollout.group_size == 1:
        yield (
            "rollout.curriculum needs the solve rates of prompts, but rollout.group_size is 1, so a prompt has only "
            "one completion. Set rollout.group_size to 2 or more, or remove the curriculum"
        )
    term = rollout.curriculum.metric or scoring.terms[0]
    reward = next((each for each in scoring.rewards if each.term == term), None)
    if reward is not None and reward.is_graded and reward.score_range is None:
        yield (
            f"rollout.curriculum needs a reward with a limited range of scores, but nothing limits the scores of "
            f"reward {term!r}, so the solve rates of prompts are unknown. Set rollout.curriculum.metric to another "
            "reward, or remove the curriculum"
        )


def _find_staleness_conflicts(update: UpdateConfig, rollout: RolloutConfig) -> Iterator[str]:
    keeps = rollout.dynamic is not None and rollout.dynamic.surplus == "keep"
    if rollout.partial is None and not keeps and not rollout.staleness:
        for name in ("stale_correction", "max_staleness"):
            if getattr(update, name) is not None:
                yield (
                    f"update.{name} has no effect: no token is ever stale without rollout.staleness, rollout.partial "
                    "or rollout.dynamic.surplus = 'keep'. Remove it, or set one of these keys"
                )
    if not rollout.staleness:
        return
    for name in ("dynamic", "partial"):
        if getattr(rollout, name) is not None:
            yield (
                f"rollout.staleness = {rollout.staleness} cannot be combined with rollout.{name}, because the next "
                "prompts would depend on an unfinished iteration. Remove one of them"
            )
    is_corrected = (update.stale_correction or update.correction).compares_with_trainer
    if not is_corrected and not update.loss.corrects_importance:
        yield (
            f"rollout.staleness is {rollout.staleness}, so tokens of an older policy need a correction. Set "
            "update.stale_correction, such as {kind = 'truncated'}"
        )
    if update.max_staleness is not None and update.max_staleness < rollout.staleness:
        yield (
            f"update.max_staleness is {update.max_staleness}, but rollout.staleness is {rollout.staleness}, so every "
            f"token would be dropped. Set update.max_staleness to at least {rollout.staleness}"
        )


def _find_replay_conflicts(rollout: RolloutConfig) -> Iterator[str]:
    if not rollout.engine.records_experts:
        yield (
            "update.router_replay needs an engine that reports the chosen experts, but rollout.engine.kind = "
            f"{rollout.engine.label!r} does not. Remove the key, or use 'transformers' or 'vllm'"
        )
    if rollout.environment is not None:
        yield (
            "update.router_replay cannot be combined with rollout.environment, because earlier tokens are read again "
            "in each turn, each time with another choice of experts. Remove one of them"
        )


def find_preference_conflicts(
    preferences: PreferencesConfig | None, *, dpo: DpoConfig | None, data: DataConfig, scoring: ScoringConfig
) -> Iterator[str]:
    """Yield one message for each reason why preference pairs (which reward models and DPO train on) are missing, are
    not used, or do not fit the data."""
    trained = list(scoring.trained_reward_models)
    if dpo is not None:
        yield from dpo.find_conflicts()
    if preferences is None:
        for term in trained:
            yield f"reward {term!r} is a model that the run trains on preference pairs. Set [preferences]"
        if dpo is not None:
            yield "[dpo] trains on preference pairs. Set [preferences]"
        return
    if dpo is None and not trained:
        yield (
            "[preferences] is set, but nothing is trained on it. Set [dpo], or add a reward of kind 'model' with "
            "model.kind = 'trained'"
        )
    yield from preferences.find_training_conflicts(dpo, trained)
    yield from preferences.find_conflicts(data)
