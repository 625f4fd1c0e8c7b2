"""Combinations of algorithm, loss, rollout and engine that cannot do what they say, each refused with its reason.

Each variant tells its own reasons; here are those that no single one of them has.
"""

from collections.abc import Iterator

from infra.config import PoolsConfig
from models.config.data import ArithmeticData, ArithmeticPreferences, DataConfig, PreferencesConfig
from models.config.engines import LORA_RANKS, PacedEngine, SamplingConfig, VllmEngine
from models.config.job import Job
from models.config.objectives import UpdateConfig
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.training import DpoConfig
from models.engines.checks import slot_engines


def reasons_against(job: Job) -> Iterator[str]:
    """Yield one line per combination that cannot work; the first is what the user is told."""
    yield from job.algorithm.reasons_against(job)
    yield from job.update.loss.reasons_against(job)
    yield from _against_staleness(job.update, job.rollout)
    if isinstance(job.rollout.engine, PacedEngine) and job.algorithm.distillation is not None:
        yield "algorithm.distillation with rollout.engine.kind 'paced': its tokens mean nothing to a teacher"


def _against_staleness(update: UpdateConfig, rollout: RolloutConfig) -> Iterator[str]:
    keeps = rollout.dynamic is not None and rollout.dynamic.surplus == "keep"
    if rollout.partial is None and not keeps:
        for name in ("stale_correction", "max_staleness"):
            if getattr(update, name) is not None:
                yield (
                    f"update.{name}: no token is ever stale without rollout.partial or rollout.dynamic.surplus='keep'"
                )


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
