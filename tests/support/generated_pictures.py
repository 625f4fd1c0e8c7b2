"""Updates of a small text-to-image policy on pictures that it generated."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.shards import write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.engines import DiffusersEngine
from rheostat.models.engines.image_generation import DiffusersImageEngine
from rheostat.models.engines.protocol import Request
from rheostat.models.modeling import initial
from rheostat.models.records.media import MEDIA
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.pictures import build_picture_table
from rheostat.models.records.schemas import SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from rheostat.models.text.tokenizer import load_tokenizer
from tests.support.demos import demo_part

PROMPTS, GROUP = ("red square left", "blue circle"), 3
COEFFICIENT = 0.1
"""Coefficient of the KL penalty."""
POLICY = demo_part("paint/scratch_diffusion:ScratchDiffusionPolicy")(layers=2, heads=2, head_size=8)


def publish(uri: str, *, seed: int) -> ModelVersion:
    """Publish an untrained policy in the store of the run `run`."""
    directory = Path(uri, f"scratch-{seed}")
    initial.write_policy(POLICY, directory, texts=PROMPTS, seed=seed)
    return ModelVersion(version=0, weights=publish_bundle(open_store(f"{uri}/run"), directory, prefix="policies"))


def build_update(
    uri: str, denoising: DenoisingConfig, levels: Sequence[int], *, window: range | None, shifts: Sequence[float] = ()
) -> tuple[UpdateWork, list[dict]]:
    """Generate pictures with a new policy, and return an update on them, whose reference is another policy, and the
    rows of its samples.

    `levels` are the denoising steps that are trained, and `window` is the window of the generation. The signs of the
    advantages alternate. `shifts` are added to the log-probs of the steps.
    """
    store, policy, reference = open_store(f"{uri}/run"), publish(uri, seed=0), publish(uri, seed=1)
    directory = fetch_bundle(store, policy.weights)
    engine, tokenizer = DiffusersImageEngine(DiffusersEngine()), load_tokenizer(directory)
    engine.load(directory, policy)
    prompts = [ModelInput.from_prompt(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    seeds = [tuple(range(GROUP * row, GROUP * row + GROUP)) for row in range(len(PROMPTS))]
    requests = [Request(row, (each,) * GROUP, seeds[row]) for row, each in enumerate(prompts)]
    rows, pictures = [], []
    for row, group in enumerate(engine.generate_images(requests, denoising, window)):
        for sample, each in enumerate(group):
            pictures.append((row, each.picture))
            rows.append(
                {
                    "prompt_row": row,
                    "sample": sample,
                    "tokens": [*prompts[row].prompt.tolist(), *each.tokens],
                    "num_prompt_tokens": len(prompts[row].prompt),
                    "images": [each.picture.digest],
                    "logprobs": (np.array(each.logprobs) + np.array(shifts or [0.0])).tolist(),
                    "advantages": [(-1) ** len(rows) * (0.5 + sample)] * len(levels),
                    "staleness": [0] * len(levels),
                }
            )
    samples = write_shard(store, pa.Table.from_pylist(rows, SAMPLE_SCHEMA), kind="samples", metadata={})
    media = write_shard(store, build_picture_table(pictures), kind=MEDIA, metadata={})
    work = UpdateWork(
        iteration=0,
        policy=policy,
        reference=reference,
        samples=(samples,),
        total_iterations=1,
        seed=0,
        kl_coefficient=COEFFICIENT,
        media=(media,),
    )
    return work, rows
