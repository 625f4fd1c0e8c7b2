"""The estimated peak memory of an update equals the measured peak."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rheostat.infra.processes.heap import heap_variables
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.inspection.memory import MicrobatchSizes, microbatch_bytes, resident_bytes
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.records.schemas import SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from rheostat.tasks.config.gpus import library_bytes
from tests.support.training import TINY, publish_scratch
from tests.support.update_workers import start_worker

SHAPE = ScratchPolicy(hidden_size=512, intermediate_size=1536, layers=8, heads=8, kv_heads=4, context=1024)
BASE = UpdateConfig(minibatches=1, microbatch_tokens=512)
CONFIGS = {
    "plain": BASE,
    "layers again": BASE.model_copy(update={"activation_checkpointing": True}),
    "zero 2": BASE.model_copy(update={"zero_stage": 2}),
    "zero 3": BASE.model_copy(update={"zero_stage": 3}),
    "bfloat16": BASE.model_copy(update={"dtype": "bfloat16"}),
    "reference": BASE.model_copy(update={"kl": KlPenalty()}),
    "adapters": BASE.model_copy(update={"kl": KlPenalty(), "lora": LoraConfig(rank=8)}),
    "magnitudes": BASE.model_copy(update={"lora": LoraConfig(rank=8, dora=True)}),
}
PROMPT, COMPLETION = 16, 112
FIRST = ("layers again", "adapters", "zero 3")
"""Configurations whose estimate consists mostly of the written copy, of the reserve of the allocator, and of gathered
weights and buckets."""


def estimate_peak(config: UpdateConfig) -> float:
    model = DecoderSizes.from_scratch(SHAPE, vocab_size=SHAPE.vocab_size).outline()
    sizes = MicrobatchSizes.compute(config, longest=PROMPT + COMPLETION, completions=8, ranks=1)
    facts = resident_bytes(config, model, ranks=1) | microbatch_bytes(config, model, sizes, held=0)
    facts |= library_bytes(config, {"parameters": model.parameters, **facts}, ranks=1, on_gpu=False)
    second = model.parameters * 4 if config.kl_penalty is not None and config.lora is None else 0
    return second + sum(value for name, value in facts.items() if name.startswith("update_"))


def samples(uri: str, *, prompts: int, group: int, prompt: int, completion: int) -> ShardRef:
    rng, rows = np.random.default_rng(0), []
    for row in range(prompts):
        shared = rng.integers(2, 300, prompt).tolist()
        for sample in range(group):
            said = {
                "tokens": shared + rng.integers(2, 300, completion).tolist(),
                "num_prompt_tokens": prompt,
                "logprobs": [-5.8] * completion,
                "advantages": [float(rng.normal())] * completion,
                "staleness": [0] * completion,
            }
            rows.append({"prompt_row": row, "sample": sample} | said)
    table = pa.Table.from_pylist(rows, SAMPLE_SCHEMA)
    return write_shard(open_store(f"{uri}/run"), table, kind="samples", metadata={})


def read_memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measured(uri: str, config: UpdateConfig) -> int:
    """Return the largest growth of this process in bytes, without libraries, during two updates.

    A micro-batch has half of the samples.
    """
    tiny, policy = (publish_scratch(f"{uri}/run", Path(uri, str(n)), policy=p) for n, p in enumerate((TINY, SHAPE)))
    worker = start_worker(uri, config)

    def update(version: ModelVersion, reference: ModelVersion, shard: ShardRef) -> ModelVersion:
        work = UpdateWork(
            iteration=version.version,
            policy=version,
            reference=reference,
            samples=(shard,),
            total_iterations=9,
            seed=0,
            kl_coefficient=0.1,
            keeps_state=False,
        )
        return worker.update(work).model

    update(tiny, tiny, samples(uri, prompts=1, group=2, prompt=3, completion=5))  # loads what libraries load late
    gc.collect()
    before = read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    shard = samples(uri, prompts=2, group=4, prompt=PROMPT, completion=COMPLETION)
    update(update(policy, policy, shard), policy, shard)
    return read_memory("VmHWM") - before


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.system if name in FIRST else pytest.mark.slow) for name in CONFIGS]
)
def test_the_peak_memory_of_an_update_is_estimated_within_15_percent(name, tmp_path):
    command = [sys.executable, "-m", __name__, str(tmp_path), name]
    environment = os.environ | heap_variables()  # as workers have them
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = int(done.stdout.split()[-1])
    assert estimate_peak(CONFIGS[name]) == pytest.approx(found, rel=0.15)


if __name__ == "__main__":
    sys.stdout.write(f"{measured(sys.argv[1], CONFIGS[sys.argv[2]])}\n")
