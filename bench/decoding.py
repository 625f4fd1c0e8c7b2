"""CPU seconds per token with an in-place and with a growing KV cache, and with and without admission of waiting rows.

The two variants of a comparison take turns in one process on one thread and generate the same tokens. Ratios are
computed per round.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from bench.tables import Table
from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.local import decoding
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.protocol import Completion, Request
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.seeds import derive_seed, sample_seed
from rheostat.models.records.versions import ModelVersion
from tests.support.policies import VOCABULARY, write_policy

ROWS, TOKENS, ROUNDS = 64, 512, 3
COMPLETIONS, MEDIAN, SIGMA = 512, 96, 0.8
SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "0.2M weights, 2 key-value heads for 4 heads": {"max_position_embeddings": 1024},
        "3M weights, 8 key-value heads for 8 heads": {
            "max_position_embeddings": 1024,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 32,
        },
    }
)


@dataclass(frozen=True, slots=True)
class DecodingCost:
    """CPU seconds, decoding steps and tokens of one run of the generation engine, with the generated completions."""

    tokens: int
    steps: int
    cpu_seconds: float
    generated: list[Completion]


def measure() -> Iterator[Table]:
    """Measure CPU seconds per generated token, on one thread as in a rollout worker.

    Yields a table that compares two KV caches, and a table that compares batch by batch generation with continuous
    batching.
    """
    torch.set_num_threads(1)
    yield measure_caches()
    yield measure_admission()


def measure_caches() -> Table:
    """Measure CPU time per token with a growing and with an in-place KV cache, for 64 completions of 512 tokens."""
    rows, notes = [], []
    for name, changes in SHAPES.items():
        engine, work = engine_with(changes), requests([TOKENS] * ROWS)

        def growing(engine: HuggingFaceEngine = engine, work: list[Request] = work) -> DecodingCost:
            with growing_cache():
                return generate(engine, [work])

        def in_place(engine: HuggingFaceEngine = engine, work: list[Request] = work) -> DecodingCost:
            return generate(engine, [work])

        pairs = compare(growing, in_place)
        for way, takes in zip(("growing", "in place"), zip(*pairs, strict=True), strict=True):
            spent = statistics.median(each.cpu_seconds / each.tokens for each in takes)
            rows.append((f"{name}: {way}", takes[0].tokens, takes[0].steps, spent * 1e6))
        notes.append(f"{name}: {ratios(pairs)}")
    return Table(
        title=f"Key-value cache of the rollout engine on 1 thread: {ROWS} completions of {TOKENS} tokens",
        columns=("", "tokens", "steps", "CPU µs per token"),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def measure_admission() -> Table:
    """Measure CPU time per token with and without continuous batching, for completions of log-normal lengths.

    Without continuous batching, the next batch starts only after all completions of the last batch have ended.
    """
    name, changes = next(iter(SHAPES.items()))
    random = np.random.Generator(np.random.Philox(derive_seed("bench")))
    lengths = np.clip(random.lognormal(np.log(MEDIAN), SIGMA, COMPLETIONS), 1, TOKENS).astype(int).tolist()
    engine, work = engine_with(changes), requests(lengths)
    passes = [work[start : start + ROWS] for start in range(0, len(work), ROWS)]
    pairs = compare(lambda: generate(engine, passes), lambda: generate(engine, [work]))
    rows = tuple(
        (way, takes[0].tokens, takes[0].steps, statistics.median(one.cpu_seconds / one.tokens for one in takes) * 1e6)
        for way, takes in zip(("batch by batch", "continuous batching"), zip(*pairs, strict=True), strict=True)
    )
    apart, admitted = pairs[0]
    return Table(
        title=f"{COMPLETIONS} completions of log-normal lengths (median {MEDIAN}, sigma {SIGMA}, at most {TOKENS}) in "
        f"{ROWS} batch rows, {name}",
        columns=("", "tokens", "steps", "CPU µs per token"),
        rows=rows,
        notes=(f"{apart.steps / admitted.steps:.2f} times fewer decoding steps; {ratios(pairs)}",),
    )


def compare(
    old: Callable[[], DecodingCost], new: Callable[[], DecodingCost]
) -> list[tuple[DecodingCost, DecodingCost]]:
    """Run the old and the new variant of generation alternately. Return the two costs of every round.

    Raises AssertionError if the variants generate different tokens.
    """
    pairs = [(old(), new()) for _ in range(ROUNDS)]
    for one, other in pairs:
        assert [row.tokens for row in one.generated] == [row.tokens for row in other.generated]
    return pairs


def ratios(pairs: list[tuple[DecodingCost, DecodingCost]]) -> str:
    """Format the CPU time of the old variant divided by that of the new variant, as median and range over rounds."""
    speedups = sorted(old.cpu_seconds / new.cpu_seconds for old, new in pairs)
    middle, rounds = statistics.median(speedups), len(speedups)
    return f"{middle:.2f} times less CPU ({speedups[0]:.2f} to {speedups[-1]:.2f} in {rounds} rounds)"


def generate(engine: HuggingFaceEngine, works: list[list[Request]]) -> DecodingCost:
    """Generate completions for several lists of requests, one list after another.

    Return the tokens, steps and CPU seconds.
    """
    steps, started = engine.step_sums().steps, time.process_time()
    completions = [one for work in works for [one] in engine.generate(work, SamplingConfig(max_new_tokens=TOKENS))]
    spent = time.process_time() - started
    return DecodingCost(
        sum(len(one.tokens) for one in completions), engine.step_sums().steps - steps, spent, completions
    )


@contextmanager
def growing_cache() -> Iterator[None]:
    """Run the block with the KV cache of transformers, which copies the whole cache for each new token."""
    replaced = decoding.use_in_place_layers
    decoding.use_in_place_layers = lambda cache: None
    try:
        yield
    finally:
        decoding.use_in_place_layers = replaced


def engine_with(changes: Mapping[str, object]) -> HuggingFaceEngine:
    """Return an engine with a random policy that almost never generates EOS.

    `changes` override the model's configuration.
    """
    engine = HuggingFaceEngine(TransformersEngine(max_batch_rows=ROWS))
    with tempfile.TemporaryDirectory() as name:
        write_policy(Path(name), eos_share=1e-9, changes=changes)
        engine.load(Path(name), ModelVersion(version=0, weights=BundleRef(key="bench", digest="bench", bytes=0)))
    return engine


def requests(lengths: list[int]) -> list[Request]:
    """Build one generation request per length in `lengths`, which is the maximum number of completion tokens.

    Each request has a prompt of 32 random tokens.
    """
    random = np.random.Generator(np.random.Philox(derive_seed("prompts")))
    return [
        Request(
            row=row,
            inputs=(ModelInput.from_prompt(random.integers(2, VOCABULARY, size=32)),),
            seeds=(sample_seed(0, 0, prompt_row=row, sample=0),),
            budget=length,
        )
        for row, length in enumerate(lengths)
    ]
