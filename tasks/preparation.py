"""Preparation of a run: input check, initial policy, tokenized prompts, and training on data (SFT, DPO, reward models).

Each result is computed once per run. The input check is a task, so that runs started without the command line are
checked too.
"""

import logging
from contextlib import nullcontext
from typing import Final

from rheostat.infra.counts import format_count
from rheostat.infra.store.manifests import Manifest
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.episodes import DialogueEnvironment
from rheostat.models.records.training_orders import order_training
from rheostat.models.records.versions import policy_of
from rheostat.models.records.work import (
    PolicyWork,
    PreferenceWork,
    PromptWork,
    RewardModelPreparation,
    UserPreparation,
    UserWarmupWork,
    WarmupWork,
)
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.placement.stage import reserve_shared_gpus
from rheostat.tasks.run.keys import BASE, DPO, PROMPTS, SFT, USER, USER_BASE, StageKey
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.preflight import preflight, with_data_sized_defaults
from rheostat.tasks.run.stages import commit_decision, run_once, stage

logger = logging.getLogger(__name__)

DROPPED: Final = {"too_long": "too long", "empty": "empty"}
"""Metrics of prompts that count the problems that are left out, with the reason in words."""
MAX_SHOWN_PROBLEMS: Final = 3
"""Maximum number of left-out problems per data source that the log names. The stored record of the prompts lists all of
them."""


@stage("initial policy", retries=2)
async def make_policy(open_run: OpenRun) -> Manifest:
    """Build or import the policy from which all training starts, according to [policy]."""
    settings = open_run.settings
    work = PolicyWork(policy=settings.policy, data=settings.data, seed=settings.seed)
    return await run_once(open_run, BASE, role="preparation", method="make_policy", work=work)


@stage("prompts {split}", retries=2)
async def make_prompts(open_run: OpenRun, base: Manifest, split: str) -> Manifest:
    """Render and tokenize the prompts of one split ("train" or "heldout"), and log which problems were left out."""
    settings = open_run.settings
    work = PromptWork(
        data=settings.data,
        split=split,
        policy=policy_of(base),
        seed=settings.seed,
        max_new_tokens=settings.rollout.sampling.max_new_tokens,
        environment=settings.rollout.environment,
    )
    existing = open_run.run.find(PROMPTS[split])
    manifest = await run_once(
        open_run, PROMPTS[split], role="preparation", method="make_prompts", work=work, parents=[base]
    )
    num_problems = sum(manifest.metrics.get(name, 0) for name in ("prompts", *DROPPED))
    for name, reason in DROPPED.items():
        if left_out := manifest.metrics.get(name):
            what = f"{left_out:,.0f} of {num_problems:,.0f} problems left out because they are {reason}"
            logger.info("prompts %s: %s (data.drop)%s", split, what, "" if existing is None else FROM_STORE_SUFFIX)
    if isinstance(left_out_problems := manifest.detail.get("left_out"), dict):
        examples = "; ".join(f"{place} {why}" for place, why in [*left_out_problems.items()][:MAX_SHOWN_PROBLEMS])
        more = "; …" if len(left_out_problems) > MAX_SHOWN_PROBLEMS else ""
        kind = settings.data.label
        logger.info(
            "prompts %s: %d problems left out (data.kind %r): %s%s", split, len(left_out_problems), kind, examples, more
        )
    return manifest


def start_pools(open_run: OpenRun) -> None:
    """Start the workers that the remaining stages of the run need, in parallel. A finished run needs no workers."""
    if open_run.run.find(PROMPTS["heldout"]) is None:
        open_run.start_pools("preparation")
    if open_run.run.find(StageKey.policy(open_run.settings.iterations)) is None:
        open_run.start_pools("update", "scoring")
        open_run.start_slots()


async def release_preparation(open_run: OpenRun) -> None:
    """Stop the preparation worker, which no later stage needs."""
    await open_run.close_pool("preparation")


@stage("check inputs")
async def check_inputs(config: RunConfig) -> CheckResult:
    """Run the preflight check and return the values that it measured, such as sizes and memory estimates. Raises
    BadInput if an input is wrong."""
    return await preflight(config)


async def check_and_adapt(config: RunConfig) -> RunConfig:
    """Run the preflight check, and return the configuration with the defaults that depend on the data. Raises BadInput
    if an input is wrong."""
    result = await check_inputs(config)
    return with_data_sized_defaults(config, result.facts)[0]


@stage("check rewards")
async def check_rewards(config: RunConfig) -> CheckResult:
    """Run the part of the preflight check that concerns rewards, before stored rollouts are scored again. Raises
    BadInput if a reward cannot be computed."""
    return await preflight(config, part="scoring")


async def prepare_policy_and_prompts(open_run: OpenRun) -> None:
    """Store everything that generation needs: the policy, the prompts of both splits, and the simulated user of
    dialogues if the run hosts its model."""
    base = await make_policy(open_run)
    await make_prompts(open_run, base, "train")
    await make_prompts(open_run, base, "heldout")
    if (dialogue := find_dialogue_with_stored_user(open_run.settings)) is not None:
        user = await make_user(open_run, dialogue)
        await train_user(open_run, dialogue, user)


MAX_SHOWN_LOSSES = 6

FROM_STORE_SUFFIX: Final = " (from the store)"
"""Suffix of log lines about results of an earlier process."""


def uses_fine_tuning(open_run: OpenRun) -> bool:
    """Return whether the policy has a supervised warm-up (SFT)."""
    return open_run.settings.warmup is not None


def uses_preference_training(open_run: OpenRun) -> bool:
    """Return whether the policy is trained with direct preference optimization (DPO)."""
    return open_run.settings.dpo is not None


@stage("fine-tuning of the policy", retries=2)
async def fine_tune_policy(open_run: OpenRun) -> Manifest:
    """Train the policy on examples or whole chats before reinforcement learning (supervised warm-up), and store the
    result."""
    settings = open_run.settings
    assert settings.warmup is not None, "fine_tune_policy needs [warmup]"
    base = open_run.run.require(BASE)
    work = WarmupWork(
        policy=policy_of(base),
        data=settings.data,
        warmup=settings.warmup,
        seed=settings.seed,
        max_new_tokens=settings.rollout.sampling.max_new_tokens,
    )
    course = settings.warmup.describe()
    return await _train_and_log(open_run, SFT, "warm-up", course=course, method="warmup", work=work, parents=[base])


@stage("preferences of the policy", retries=2)
async def train_policy_on_preferences(open_run: OpenRun) -> Manifest:
    """Train the policy on pairs of completions with DPO or another preference loss, and store the result."""
    settings = open_run.settings
    assert settings.dpo is not None and settings.preferences is not None, (
        "train_policy_on_preferences needs [dpo] and [preferences]"
    )
    start = open_run.run.require(SFT if uses_fine_tuning(open_run) else BASE)
    work = PreferenceWork(
        policy=policy_of(start),
        data=settings.data,
        preferences=settings.preferences,
        dpo=settings.dpo,
        seed=settings.seed,
    )
    course = settings.dpo.describe(settings.preferences.noun)
    return await _train_and_log(open_run, DPO, "DPO", course=course, method="prefer", work=work, parents=[start])


@stage("policy 0")
async def commit_initial_policy(open_run: OpenRun) -> Manifest:
    """Store the policy with which reinforcement learning starts as version 0. It is the policy after SFT and DPO,
    if configured."""
    trained = open_run.run.require(
        DPO if uses_preference_training(open_run) else SFT if uses_fine_tuning(open_run) else BASE
    )
    return commit_decision(
        open_run, StageKey.policy(0), parents=[trained], bundles=trained.bundles, detail={"version": 0}
    )


async def _train_and_log(
    open_run: OpenRun, key: StageKey, what: str, *, course: str, method: str, work: object, parents: list[Manifest]
) -> Manifest:
    """Train a model on the update ranks (SFT, DPO or pairs) and log the losses. If the result is already stored, only
    log it."""
    existing = open_run.run.find(key)
    if existing is None:
        logger.info("%s: %s", what, course)
    async with nullcontext() if existing is not None else reserve_shared_gpus(open_run):
        trained = await run_once(open_run, key, role="update", method=method, work=work, parents=parents)
    preferences = open_run.settings.preferences
    losses = describe_losses(trained, "pair" if preferences is None else preferences.noun)
    logger.info("%s: %s%s", what, losses, "" if existing is None else FROM_STORE_SUFFIX)
    return trained


def describe_losses(trained: Manifest, noun: str = "pair") -> str:
    """Describe a finished training in one line: some losses from first to last, the duration, and the accuracy or loss
    on held-out data if there is any. `noun` is the singular noun for one preference."""
    losses, metrics = losses_of(trained), trained.metrics
    stride = -(-len(losses) // MAX_SHOWN_LOSSES)
    course = " ".join(f"{loss:.3f}" for loss in [*losses[:-1:stride], losses[-1]])
    heldout = ""
    if "heldout_labels" in metrics:
        steps, share = format_count(metrics["heldout_labels"], "held-out step"), metrics["heldout_right"]
        heldout = f"; accuracy {metrics['heldout_accuracy']:.3f} on {steps}, of which {share:.1%} are right"
    elif "heldout_accuracy" in metrics:
        right, count = metrics["heldout_accuracy"], format_count(metrics["heldout_pairs"], f"held-out {noun}")
        heldout = f"; accuracy {right:.3f} on {count}, margin {metrics['heldout_margin']:.2f}"
    elif "heldout_loss" in metrics:
        heldout = f"; loss on {metrics['heldout_chats']:,.0f} held-out chats {metrics['heldout_loss_first']:.3f} before"
        heldout += f", {metrics['heldout_loss']:.3f} after"
    return f"loss {course} after {trained.provenance.seconds['stage']:.0f} s{heldout}"


def losses_of(trained: Manifest) -> list[float]:
    """Return the training losses that were recorded at a few steps, from the first step to the last."""
    losses = trained.detail["losses"]
    assert isinstance(losses, list)
    return [loss for loss in losses if isinstance(loss, float)]


@stage("{term}", retries=2)
async def make_reward_model(open_run: OpenRun, term: str, prefix: str = "") -> Manifest:
    """Store the model with which a judge or reward model starts: built, copied, or the run's initial policy.
    `prefix` is set if the rewards are computed again for an existing run (rescoring)."""
    settings = open_run.settings
    reward, key = settings.scoring.model_rewards[term], StageKey.reward_model(term, is_base=True).with_prefix(prefix)
    if reward.model.begins_as_policy:
        policy = open_run.run.require(StageKey.policy(0))
        return commit_decision(open_run, key, parents=[policy], bundles=policy.bundles, detail={"version": 0})
    work = RewardModelPreparation(reward=reward, data=settings.data, seed=settings.seed)
    return await run_once(open_run, key, role="preparation", method="make_reward_model", work=work)


@stage("{term} training", retries=2)
async def train_reward_model(open_run: OpenRun, term: str, base: Manifest, prefix: str = "") -> Manifest:
    """Store the model that scores completions for one reward: trained if the run trains it, otherwise equal to
    `base`."""
    settings = open_run.settings
    reward, key = settings.scoring.model_rewards[term], StageKey.reward_model(term).with_prefix(prefix)
    work = order_training(
        policy_of(base), reward, data=settings.data, preferences=settings.preferences, seed=settings.seed
    )
    if work is None:
        return commit_decision(open_run, key, parents=[base], bundles=base.bundles, detail={"version": 0})
    return await _train_and_log(open_run, key, term, course=work.course, method=work.method, work=work, parents=[base])


def find_dialogue_with_stored_user(settings: RunConfig) -> DialogueEnvironment | None:
    """Return the dialogue environment whose simulated user is a model stored in the run, or None."""
    environment = settings.rollout.environment
    dialogue = None if environment is None else environment.dialogue
    return None if dialogue is None or dialogue.model.local_engine is None else dialogue


@stage("user", retries=2)
async def make_user(open_run: OpenRun, dialogue: DialogueEnvironment) -> Manifest:
    """Store the model with which the simulated user starts, built or copied as configured."""
    work = UserPreparation(environment=dialogue, data=open_run.settings.data, seed=open_run.settings.seed)
    return await run_once(open_run, USER_BASE, role="preparation", method="make_user", work=work)


@stage("user training", retries=2)
async def train_user(open_run: OpenRun, dialogue: DialogueEnvironment, base: Manifest) -> Manifest:
    """Store the model of the simulated user: trained if the run trains it, otherwise equal to `base`."""
    settings, warmup = open_run.settings, dialogue.model.training
    if warmup is None:
        return commit_decision(open_run, USER, parents=[base], bundles=base.bundles, detail={"version": 0})
    user = policy_of(base)
    work = UserWarmupWork(user=user, environment=dialogue, data=settings.data, warmup=warmup, seed=settings.seed)
    course = f"{format_count(warmup.steps, 'step')} of {format_count(warmup.batch_size, 'example')}"
    return await _train_and_log(open_run, USER, "user", course=course, method="warm_user", work=work, parents=[base])
