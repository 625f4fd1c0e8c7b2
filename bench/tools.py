"""Speed of an engine while tools of its episodes answer, compared with tools that answer at once."""

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from bench.tables import Table
from bench.vllm import VLLM_VARIABLE
from rheostat.infra.environments.find import find_python
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import EngineConfig, SamplingConfig, TransformersEngine, VllmEngine
from rheostat.models.config.environments import TargetEnvironment
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import RolloutWork
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.policies import small_tokenizer, write_policy

PROMPTS, GROUP, TURNS, PAIRS = 16, 4, 3, 3
MEAN_SECONDS, SIGMA = 1.0, 0.5
TURN_TOKENS, EOS_SHARE = 256, 0.02
THREADS = 1
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
"""Sizes of the policy model. The model is large enough for generation to take most of the time."""


@dataclass(frozen=True, slots=True)
class EpisodeTimes:
    """Times and token count of one shard of episodes in which the policy calls tools."""

    tokens: float
    seconds: float
    """Seconds for generating all episodes, including the time in which tools run."""
    waiting_seconds: float
    """Seconds, within `seconds`, in which no token was generated because all episodes waited for tools."""

    @classmethod
    def of(cls, outcome: Outcome) -> "EpisodeTimes":
        timings = outcome.timings or {}
        return cls(outcome.metrics["tokens"], timings["generate"], timings["environment"])

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def busy_share(self) -> float:
        """Share of the generation time in which the engine generated tokens instead of waiting for tools."""
        return 1 - self.waiting_seconds / self.seconds


def measure() -> Iterator[Table]:
    """Measure how much slow tools reduce the engine's tokens per second.

    Yields a table for each of four ways to run episodes: in rounds of one batch, in rounds of two batches, and each
    episode independently on the engine `transformers` and on vLLM.
    """
    configured = os.environ.get(VLLM_VARIABLE)
    python = find_python("vllm", Path(configured) if configured else None)
    vllm = VllmEngine(python=python, dtype="float32", cache_gib=0.5, max_batch_rows=PROMPTS * GROUP)
    ways: dict[str, tuple[EngineConfig, dict[str, object]]] = {
        "transformers, in rounds": (TransformersEngine(), {}),
        "transformers, in rounds of two batches": (TransformersEngine(), {"batches": 2}),
        "transformers, each at its own pace": (TransformersEngine(), {"pace": "free"}),
        "vLLM, each at its own pace": (vllm, {}),
    }
    for name, (engine, changes) in ways.items():
        yield _table(name, *_pairs(engine, changes))


def _pairs(engine: EngineConfig, changes: Mapping[str, object]) -> tuple[list[tuple[EpisodeTimes, EpisodeTimes]], bool]:
    """Generate all episodes alternately with immediate tools and with tools that sleep.

    Return one pair of times (immediate, sleeping) per repetition, and whether all tokens were the same.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        store = open_store(f"{name}/bench")
        work = build_work(store, Path(name) / "policy")
        at_once, sleeping = (replace(work, prompts=write_prompts(store, seconds)) for seconds in (0.0, MEAN_SECONDS))
        with _worker(name, engine, changes) as worker:
            made = [worker.generate(at_once)]  # starts processes and loads the policy
            pairs = []
            for _ in range(PAIRS):
                made += [worker.generate(at_once), worker.generate(sleeping)]
                pairs.append((EpisodeTimes.of(made[-2]), EpisodeTimes.of(made[-1])))
        first, *others = [_written(store, outcome.shards[0]) for outcome in made]
    return pairs, all(other == first for other in others)


@contextmanager
def _worker(home: str, engine: EngineConfig, changes: Mapping[str, object]) -> Iterator[RolloutWorker]:
    settings = TargetEnvironment(
        target="bench.sleeping:Sleeping",
        options={"sigma": SIGMA, "turns": TURNS},
        prompts="text",
        parser="none",
        max_turns=TURNS,
        turn_tokens=TURN_TOKENS,
        processes=PROMPTS * GROUP,
    ).model_copy(update=changes)
    worker = RolloutWorker(home, "bench", engine, THREADS, environment=settings)
    try:
        yield worker
    finally:
        worker.close()


def build_work(store: Store, policy: Path, *, eos_share: float = EOS_SHARE) -> RolloutWork:
    """Write a policy and its prompts, and return the work of a shard of episodes. `eos_share` is the probability of the
    end token."""
    write_policy(policy, eos_share=eos_share, changes=SHAPE)
    return RolloutWork(
        iteration=1,
        policy=ModelVersion(version=0, weights=publish_bundle(store, policy, prefix="policies")),
        prompts=write_prompts(store, 0.0),
        rows=tuple(range(PROMPTS)),
        group_size=GROUP,
        sampling=SamplingConfig(max_new_tokens=TURNS * TURN_TOKENS),
        seed=0,
    )


def write_prompts(store: Store, mean_seconds: float) -> ShardRef:
    """Write a shard of prompts with the column `mean_seconds`."""
    texts = [f"Ana has {row} pens, buys {row % 7}. How many?" for row in range(PROMPTS)]
    columns = {
        "prompt_id": [f"{row:016x}" for row in range(PROMPTS)],
        "text": texts,
        "tokens": [small_tokenizer().encode(text) for text in texts],
        "images": [[]] * PROMPTS,
        "answer": [""] * PROMPTS,
        "columns": [f'{{"mean_seconds": {mean_seconds}}}'] * PROMPTS,
        "messages": [None] * PROMPTS,
    }
    return write_shard(store, pa.table(columns, schema=PROMPT_SCHEMA), kind="prompts", metadata={})


def _written(store: Store, shard: ShardRef) -> list[list[int]]:
    tokens: list[list[int]] = read_shard(store, shard, columns=["completion_tokens"])["completion_tokens"].to_pylist()
    return tokens


def _table(name: str, pairs: list[tuple[EpisodeTimes, EpisodeTimes]], same: bool) -> Table:
    plain, tools = zip(*pairs, strict=True)
    ratios = [sleeping.tokens_per_second / at_once.tokens_per_second for at_once, sleeping in pairs]

    def row(label: str, values: list[float]) -> tuple[str, float, float, float]:
        return label, statistics.median(values), min(values), max(values)

    return Table(
        title=f"{name}: {PROMPTS * GROUP} episodes of up to {TURNS} turns, tools of {MEAN_SECONDS:g} s "
        f"(log-normal, sigma {SIGMA:g}), {plain[0].tokens:,.0f} tokens, {THREADS} thread",
        columns=("", "median", "least", "most"),
        rows=(
            row("tools that answer immediately, tokens/s", [each.tokens_per_second for each in plain]),
            row("tools that sleep, tokens/s", [each.tokens_per_second for each in tools]),
            row("ratio, pair by pair", ratios),
            row("immediate answers, seconds", [each.seconds for each in plain]),
            row("sleeping tools, seconds", [each.seconds for each in tools]),
            row("of which no token is generated", [each.waiting_seconds for each in tools]),
            row("share in which tokens are generated", [each.busy_share for each in tools]),
        ),
        notes=(
            f"{PAIRS} pairs after a warm-up shard; the target is a ratio of 0.8",
            "other processes on the cores slow down the engine but not the tools, which makes both shares too high",
            f"the tokens of all shards are {'the same' if same else 'not exactly the same'}",
        ),
    )
