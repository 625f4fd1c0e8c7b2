"""Parts of a job's configuration that variants check themselves against, and all such checks. Torch-free.

Each variant reports its own conflicts. This module adds the conflicts that belong to no single variant.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from infra.config import PoolsConfig
from models.config.algorithms import Algorithm
from models.config.attention import reasons_against_attention
from models.config.data import DataConfig, PreferencesConfig
from models.config.engines import EngineSettings
from models.config.objectives import UpdateConfig
from models.config.policy import PolicySource
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.training import DpoConfig, WarmupConfig


@dataclass(frozen=True, slots=True)
class Job:
    """Parts of a run's configuration that decide whether its variants can be combined."""

    algorithm: Algorithm
    update: UpdateConfig
    rollout: RolloutConfig
    scoring: ScoringConfig
    pools: PoolsConfig
    iterations: int


def slot_engines(rollout: RolloutConfig | None, scoring: ScoringConfig) -> Iterator[tuple[str, EngineSettings, int]]:
    """Yield the key, the settings and the slots per worker of every engine that runs in worker slots."""
    if rollout is not None:
        yield "rollout.engine", rollout.engine, 1
        dialogue = None if rollout.environment is None else rollout.environment.dialogue
        if dialogue is not None and dialogue.model.held is not None:
            yield "rollout.environment.model.engine", dialogue.model.held, 1
    for term, reward in scoring.hosted_rewards.items():
        if reward.engine is not None:
            yield f"reward {term!r}: model.engine", reward.engine, reward.slots


def reasons_against(job: Job) -> Iterator[str]:
    """Yield one line per invalid combination of settings. The user is shown the first."""
    yield from job.algorithm.reasons_against(job)
    yield from job.update.loss.reasons_against(job)
    yield from job.update.optimizer.reasons_against(job.update)
    if job.pools.update_ranks % job.update.sequence_parallel:
        yield (
            f"update.sequence_parallel {job.update.sequence_parallel}: expected a divisor of pools.update_ranks "
            f"{job.pools.update_ranks}"
        )
    yield from reasons_against_attention(job.update, job.pools)
    yield from _against_staleness(job.update, job.rollout)
    yield from job.rollout.engine.reasons_against(job)
    if job.update.router_replay is not None:
        yield from _against_replay(job.rollout)
    if job.rollout.environment is not None:
        yield from job.rollout.environment.reasons_against(job)
    elif job.scoring.environment_rewards:
        [term, *_] = job.scoring.environment_rewards
        yield f"reward {term!r}: no environment gives it, set [rollout.environment] or remove the reward"
    else:
        pairs = zip(job.scoring.terms, job.scoring.rewards, strict=True)
        for term in (term for term, reward in pairs if reward.valued == "turn"):
            yield f"reward {term!r}: per = 'turn' values turns of episodes, set [rollout.environment]"
    for name, engine, slots in slot_engines(job.rollout, job.scoring):
        yield from engine.reasons_against_place(name, gpus=slots * job.pools.gpus_per_worker, pools=job.pools)


def reasons_against_drawing(
    policy: PolicySource, job: Job, *, warmup: WarmupConfig | None, data: DataConfig
) -> Iterator[str]:
    """Yield one line per setting that a text-to-image policy needs or forbids, or that needs a text-to-image policy."""
    denoising, engine = job.rollout.denoising, job.rollout.engine
    if not policy.draws:
        if denoising is not None:
            yield f"rollout.denoising: policy.kind {policy.known_as!r} writes text; set policy.kind='diffusion'"
        if engine.draws:
            yield f"rollout.engine.kind {engine.known_as!r}: policy.kind {policy.known_as!r} writes text"
        return
    kind = f"policy.kind {policy.known_as!r}, which draws"
    if denoising is None:
        yield f"{kind}: expected [rollout.denoising], which says in how many steps and by which sampler"
    if not engine.draws:
        yield f"rollout.engine.kind {engine.known_as!r} with {kind}: expected 'diffusers'"
    if warmup is not None:
        yield from _against_imitating(policy, data)
    rollout, update = job.rollout, job.update
    others = {
        "rollout.partial": (rollout.partial is not None, "a picture is drawn to its end"),
        "rollout.environment": (rollout.environment is not None, "a picture is one turn"),
        "rollout.dynamic.surplus 'keep'": (
            rollout.dynamic is not None and rollout.dynamic.surplus == "keep",
            "its states would be kept too, use 'return'",
        ),
        "algorithm.distillation": (job.algorithm.distillation is not None, "teachers read text"),
        "algorithm.critic": (job.algorithm.value_model is not None, "critics read text, use grpo"),
        f"algorithm.kind {job.algorithm.known_as!r}": (job.algorithm.credits_steps, "it credits steps of a text"),
        f"update.loss.kind {update.loss.known_as!r}": (
            update.loss.compares_sequences,
            "a step's log-prob is a mean already, use 'ppo_clip'",
        ),
        "update.router_loss": (update.router_loss is not None, "it has no experts"),
        "update.sequence_parallel": (update.sequence_parallel > 1, "its passes are not cut, use 1"),
        "update.attention": (update.attention is not None, "diffusers computes it, leave it unset"),
        "update.freeze": (bool(update.freeze), "all but its denoiser stays as it is anyway"),
    }
    yield from (f"{name} with {kind}: {why}" for name, (is_set, why) in others.items() if is_set)
    for term, reward in zip(job.scoring.terms, job.scoring.rewards, strict=True):
        if reward.values_steps:
            yield f"reward {term!r} values steps of a text, with {kind}: expected one that values the whole picture"
        if not reward.looks:
            yield (
                f"reward {term!r} looks at no picture, with {kind}: expected 'painting', 'clip', a judge with "
                "images='prompt', or a target with a parameter `images`"
            )


def _against_imitating(policy: PolicySource, data: DataConfig) -> Iterator[str]:
    if policy.picture_side is None:
        yield f"warmup with policy.kind {policy.known_as!r}: it comes trained as it is, remove [warmup]"
    elif not data.pictures:
        yield f"warmup: data.kind {data.known_as!r} has no pictures to imitate, remove [warmup]"


def _against_staleness(update: UpdateConfig, rollout: RolloutConfig) -> Iterator[str]:
    keeps = rollout.dynamic is not None and rollout.dynamic.surplus == "keep"
    if rollout.partial is None and not keeps and not rollout.staleness:
        for name in ("stale_correction", "max_staleness"):
            if getattr(update, name) is not None:
                yield (
                    f"update.{name}: no token is ever stale without rollout.staleness, rollout.partial or "
                    "rollout.dynamic.surplus='keep'"
                )
    if not rollout.staleness:
        return
    for name in ("dynamic", "partial"):
        if getattr(rollout, name) is not None:
            yield (
                f"rollout.staleness {rollout.staleness} with rollout.{name}: the next prompts would depend on an "
                "iteration that is not finished; leave one of them out"
            )
    if not (update.stale_correction or update.correction).compares_with_trainer:
        yield (
            f"rollout.staleness {rollout.staleness}: tokens of an older policy need a correction; set "
            "update.stale_correction, such as {kind = 'truncated'}"
        )
    if update.max_staleness is not None and update.max_staleness < rollout.staleness:
        yield (
            f"update.max_staleness {update.max_staleness} would drop every token of rollout.staleness "
            f"{rollout.staleness}"
        )


def _against_replay(rollout: RolloutConfig) -> Iterator[str]:
    if not rollout.engine.notes_experts:
        yield (
            f"update.router_replay with rollout.engine.kind {rollout.engine.known_as!r}: it does not tell which "
            "experts it chose; leave the key out, or use rollout.engine.kind='transformers' or 'vllm'"
        )
    if rollout.environment is not None:
        yield (
            "update.router_replay with rollout.environment: what is read again in each turn has no one choice of "
            "experts; leave one of them out"
        )


def reasons_against_preferences(
    preferences: PreferencesConfig | None, *, dpo: DpoConfig | None, data: DataConfig, scoring: ScoringConfig
) -> Iterator[str]:
    """Yield one line per conflict of the preferences with what is trained on them: reward models and DPO."""
    trained = list(scoring.trained_reward_models)
    if preferences is None:
        for term in trained:
            yield f"reward {term!r}: a trained reward model learns from preferences, set [preferences]"
        if dpo is not None:
            yield "dpo learns from preferences, set [preferences]"
        return
    if dpo is None and not trained:
        yield "preferences: nothing learns from them, set [dpo] or a reward of kind 'model' with model.kind 'trained'"
    yield from preferences.reasons_against(data)
