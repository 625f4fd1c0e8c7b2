"""Combinations of algorithm, loss, rollout and engine that cannot do what they say, each refused with its reason."""

from collections.abc import Iterator

from infra.config import PoolsConfig
from models.algorithms.advantages import reward_kl
from models.config.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Capo,
    DistillationOnly,
    GroupRelative,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    TeacherEndpoint,
)
from models.config.data import ArithmeticData, ArithmeticPreferences, DataConfig, PreferencesConfig
from models.config.engines import LORA_RANKS, PacedEngine, SamplingConfig, VllmEngine
from models.config.objectives import Gspo, KlPenalty, NoCorrection, PolicyGradient, PpoClip, UpdateConfig
from models.config.rewards import ScoringConfig, is_process
from models.config.rollout import RolloutConfig
from models.config.training import DpoConfig
from models.engines.checks import slot_engines


def reasons_against(
    algorithm: AlgorithmConfig,
    *,
    update: UpdateConfig,
    rollout: RolloutConfig,
    scoring: ScoringConfig,
    iterations: int,
) -> Iterator[str]:
    """Yield one line per combination that cannot work; the first is what the user is told."""
    yield from _against_groups(algorithm, rollout)
    yield from _against_penalties(algorithm, update, longest=rollout.sampling.max_new_tokens)
    yield from _against_losses(update)
    yield from _against_staleness(update, rollout)
    yield from _against_teachers(algorithm, rollout)
    if isinstance(algorithm, Capo):
        yield from _against_flags(algorithm, scoring)
    if isinstance(algorithm, Ppo) and 0 < iterations <= algorithm.critic.warmup_iterations:
        yield (
            f"algorithm.critic.warmup_iterations {algorithm.critic.warmup_iterations}: the policy would never learn in "
            f"{iterations} iterations"
        )
    if iterations and algorithm.distillation is None and not any(reward.weight for reward in scoring.rewards):
        yield "scoring.rewards: every weight is 0, so there is nothing to learn from"


def _against_groups(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    compares = isinstance(algorithm, GroupRelative | ReinforcePlusPlusBaseline | Capo)
    if compares and rollout.group_size < 2:
        yield (
            f"rollout.group_size {rollout.group_size}: {algorithm.kind} compares the completions of a group, use at "
            "least 2; ppo, reinforce_pp and distillation need no group"
        )
    if isinstance(algorithm, Ppo | ReinforcePlusPlus | DistillationOnly) and rollout.dynamic is not None:
        yield (
            f"rollout.dynamic with algorithm.kind {algorithm.kind!r}: groups of equal rewards teach it too, so leaving "
            "them out would bias it"
        )
    keeps = isinstance(algorithm, GroupRelative | ReinforcePlusPlusBaseline) and algorithm.keep_uninformative
    if keeps and rollout.dynamic is not None:
        yield (
            "algorithm.keep_uninformative with rollout.dynamic: dynamic sampling leaves uninformative groups out; "
            "to fill up with them, set rollout.dynamic.on_shortfall='fill'"
        )


def _against_penalties(algorithm: AlgorithmConfig, update: UpdateConfig, *, longest: int) -> Iterator[str]:
    if reward_kl(algorithm) is not None and isinstance(update.kl, KlPenalty):
        yield "algorithm.kl and update.kl: the divergence would be penalised twice, keep one of them"
    if isinstance(algorithm, GroupRelative) and algorithm.combine == "normalise_then_sum":
        if algorithm.kl is not None:
            yield "algorithm.kl with combine 'normalise_then_sum': the penalty is no term of its own, use update.kl"
        if algorithm.overlong is not None:
            yield "algorithm.overlong with combine 'normalise_then_sum': the penalty is no term of its own"
    if algorithm.overlong is not None and algorithm.overlong.buffer >= longest:
        yield f"algorithm.overlong.buffer {algorithm.overlong.buffer}: expected less than max_new_tokens {longest}"


def _against_losses(update: UpdateConfig) -> Iterator[str]:
    loss = update.loss
    if isinstance(loss, PolicyGradient) and update.minibatches > 1:
        yield (
            f"update.minibatches {update.minibatches} with loss.kind 'policy_gradient': nothing corrects for steps "
            "taken before, use 1, or ppo_clip or cispo"
        )
    if isinstance(loss, Gspo) and isinstance(update.correction, NoCorrection):
        yield (
            "update.loss.kind 'gspo' with correction.kind 'none': the engine's arithmetic differs by more than its "
            "bounds; use 'truncated' or 'masked', which compare with the trainer's own log-probs"
        )
    if isinstance(loss, PpoClip) and loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        yield (
            f"update.loss.dual_clip {loss.dual_clip:g}: expected more than 1 + clip_high = {1 + loss.clip_high:g}, or "
            "it would cut ratios that are not clipped"
        )


def _against_staleness(update: UpdateConfig, rollout: RolloutConfig) -> Iterator[str]:
    keeps = rollout.dynamic is not None and rollout.dynamic.surplus == "keep"
    if rollout.partial is None and not keeps:
        for name in ("stale_correction", "max_staleness"):
            if getattr(update, name) is not None:
                yield (
                    f"update.{name}: no token is ever stale without rollout.partial or rollout.dynamic.surplus='keep'"
                )


def _against_flags(algorithm: Capo, scoring: ScoringConfig) -> Iterator[str]:
    """CAPO (arXiv 2508.02298) needs outcomes and flags, and its four classes of tokens must keep their order."""
    outcome = sum(reward.weight for reward in scoring.rewards if not is_process(reward))
    process = sum(abs(reward.weight) for reward in scoring.rewards if is_process(reward))
    if not process:
        yield (
            "algorithm.kind 'capo': expected a reward that values steps or tokens: a target with per='step' or "
            "per='token', or a judge with verdict.kind='steps'"
        )
    elif outcome <= 0:
        yield "algorithm.kind 'capo': expected a reward of whole completions with a weight above 0, such as numeric"
    elif outcome <= process and not algorithm.allow_low_outcome:
        yield (
            f"algorithm.kind 'capo': outcomes weigh {outcome:g} and flags {process:g}, so a flagged token of a right "
            "answer falls to the level of a wrong answer; weigh outcomes more, or set algorithm.allow_low_outcome"
        )


def _against_teachers(algorithm: Algorithm, rollout: RolloutConfig) -> Iterator[str]:
    teacher = None if algorithm.distillation is None else algorithm.distillation.teacher
    temperature = rollout.sampling.temperature
    if isinstance(teacher, TeacherEndpoint) and temperature != 1:
        yield (
            f"rollout.sampling.temperature {temperature:g}: a teacher behind an endpoint answers at temperature 1, use "
            "1, or a teacher directory"
        )
    if isinstance(rollout.engine, PacedEngine) and teacher is not None:
        yield "algorithm.distillation with rollout.engine.kind 'paced': its tokens mean nothing to a teacher"
    if isinstance(algorithm, DistillationOnly) and algorithm.overlong is not None:
        yield "algorithm.overlong with algorithm.kind 'distillation': rewards earn nothing there, so nothing is taken"


def reasons_against_preferences(
    preferences: PreferencesConfig | None, *, dpo: DpoConfig | None, data: DataConfig, scoring: ScoringConfig
) -> Iterator[str]:
    """Yield one line for each thing that preferences are for and lack, or that lacks them."""
    trained = list(scoring.trained_reward_models)
    if preferences is None:
        for term in trained:
            yield f"reward {term!r}: a trained reward model learns from preferences, set [preferences]"
        if dpo is not None:
            yield "dpo learns from preferences, set [preferences]"
        return
    if dpo is None and not trained:
        yield "preferences: nothing learns from them, set [dpo] or a reward of kind 'model' with model.kind 'trained'"
    if isinstance(preferences, ArithmeticPreferences) and not isinstance(data, ArithmeticData):
        yield (
            f"preferences.kind 'arithmetic' with data.kind {data.kind!r}: its pairs are made from arithmetic problems, "
            "use preferences.kind 'file'"
        )


def reasons_against_engines(
    rollout: RolloutConfig, *, update: UpdateConfig, scoring: ScoringConfig, pools: PoolsConfig
) -> Iterator[str]:
    """Yield one line per combination that cannot work; the first is what the user is told."""
    if isinstance(rollout.engine, VllmEngine):
        yield from _against_logprobs(rollout.engine, rollout.sampling)
        yield from _against_adapters(rollout.engine, update, pools)
    for name, engine, slots in slot_engines(rollout, scoring):
        if isinstance(engine, VllmEngine):
            yield from _against_place(name, engine, gpus=slots * pools.gpus_per_worker, pools=pools)


def _against_logprobs(engine: VllmEngine, sampling: SamplingConfig) -> Iterator[str]:
    """The trainer computes log-probs at the sampling temperature over the whole vocabulary."""
    if engine.logprobs == "processed" and (sampling.top_p < 1 or sampling.top_k > 0):
        cut = f"top_p {sampling.top_p:g}" if sampling.top_p < 1 else f"top_k {sampling.top_k}"
        out = "set rollout.engine.logprobs='raw'" if sampling.temperature == 1 else _tempered()
        yield (
            f"rollout.sampling.{cut} with rollout.engine.logprobs 'processed': those are of the truncated softmax, the "
            f"trainer's of the whole; {out}, or sample without truncation"
        )
    if engine.logprobs == "raw" and sampling.temperature != 1:
        truncated = sampling.top_p < 1 or sampling.top_k > 0
        out = "sample at temperature 1" if truncated else "use 'processed'"
        yield (
            f"rollout.engine.logprobs 'raw' with rollout.sampling.temperature {sampling.temperature:g}: the trainer's "
            f"are tempered; {out}"
        )


def _tempered() -> str:
    return "set rollout.engine.logprobs='raw' and rollout.sampling.temperature=1"


def _against_adapters(engine: VllmEngine, update: UpdateConfig, pools: PoolsConfig) -> Iterator[str]:
    """Adapters are served as they are, never merged: no full weights move."""
    if update.lora is None:
        return
    if update.lora.rank > LORA_RANKS[-1]:
        yield (
            f"update.lora.rank {update.lora.rank} with rollout.engine.kind 'vllm': it serves adapters of a rank up to "
            f"{LORA_RANKS[-1]}, use that or rollout.engine.kind='transformers'"
        )
    if engine.dtype == "float32" and pools.gpus_per_worker:
        yield (
            "update.lora with rollout.engine.dtype 'float32' on GPUs: vLLM's kernels for adapters take 16 bits, set "
            "rollout.engine.dtype='bfloat16'"
        )


def _against_place(name: str, engine: VllmEngine, *, gpus: float, pools: PoolsConfig) -> Iterator[str]:
    if engine.base_urls:
        return
    if engine.api_key_variable is not None:
        yield f"{name}.api_key_variable: a server that a worker starts gets a key of its own, set {name}.base_urls"
    if engine.tensor_parallel > 1 and gpus < engine.tensor_parallel:
        yield (
            f"{name}.tensor_parallel {engine.tensor_parallel}: its worker has {gpus:g} GPUs, expected as many; set "
            f"pools.gpus_per_worker={engine.tensor_parallel}, or {name}.base_urls"
        )
    sharing = min(pools.workers, int(1 / gpus)) if 0 < gpus < 1 else 1
    if sharing * engine.gpu_memory_share > 1:
        yield (
            f"{name}.gpu_memory_share {engine.gpu_memory_share:g}: {sharing} workers share a GPU at "
            f"pools.gpus_per_worker {pools.gpus_per_worker:g}, so expected at most {1 / sharing:.2g}"
        )
