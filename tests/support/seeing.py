"""Vision-language policies in a store, with samples and images for them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.data.images import digest_of
from rheostat.models.records.media import MEDIA
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import MEDIA_SCHEMA, PROMPT_SCHEMA, SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from rheostat.models.vision.color_conversion import decode_rgb
from rheostat.models.vision.families import ImageSize
from rheostat.models.vision.processor import load_processor
from tests.support.vision import picture, write_seeing

PICTURES = {digest_of(encoded): encoded for encoded in map(picture, range(4))}
"""24 x 24 pixels each, by digest."""


def publish_seeing(store_uri: str, directory: Path, kind: str = "idefics3", *, seed: int = 0) -> ModelVersion:
    """Publish a policy of a family as version 0."""
    write_seeing(directory, kind, seed=seed)
    return ModelVersion(version=0, weights=publish_bundle(open_store(store_uri), directory, prefix="policies"))


def write_media(store_uri: str) -> ShardRef:
    """Write the pictures as a media shard."""
    rows = [
        {"digest": digest, "format": "PNG", "width": 24, "height": 24, "bytes": encoded}
        for digest, encoded in PICTURES.items()
    ]
    return write_shard(open_store(store_uri), pa.Table.from_pylist(rows, MEDIA_SCHEMA), kind=MEDIA, metadata={})


def prompts_of(directory: Path, shown: list[int]) -> list[ModelInput]:
    """Build prompts, each with this number of pictures."""
    processor, names = load_processor(directory), [*PICTURES]
    found = []
    for row, count in enumerate(shown):
        places = [token for _ in range(count) for token in (processor.place_id, 11)]
        tokens = processor.expand([5 + row, *places, 7, 8], [ImageSize(24, 24)] * count)
        found.append(ModelInput.from_prompt(tokens, [names[(row + each) % len(names)] for each in range(count)]))
    return found


def logits_of(directory: Path, tokens: list[int], image: bytes) -> Tensor:
    """Return the logits of all positions of a text with an image, as transformers runs the model."""
    processor, model = load_processor(directory), AutoModelForImageTextToText.from_pretrained(directory).eval()
    options = {"do_pan_and_scan": False} if model.config.model_type == "gemma3" else {}
    seen = AutoImageProcessor.from_pretrained(directory, backend="pil")(
        images=[decode_rgb(image)], return_tensors="pt", **options
    )
    taken = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
    arrays = {name: seen[name] for name in taken if name in seen}
    ids_1T = torch.tensor([tokens])
    for kind, name in {"qwen": "mm_token_type_ids", "gemma3": "token_type_ids"}.items():
        if model.config.model_type.startswith(kind):
            arrays[name] = (ids_1T == processor.image_id).long()
    with torch.no_grad():
        return model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), **arrays).logits[0]


def write_prompts(store_uri: str, directory: Path, shown: list[int]) -> ShardRef:
    """Write the prompts."""
    rows = [
        {
            "prompt_id": str(row),
            "text": "",
            "tokens": each.tokens.tolist(),
            "images": each.images,
            "answer": "",
            "columns": "{}",
        }
        for row, each in enumerate(prompts_of(directory, shown))
    ]
    return write_shard(open_store(store_uri), pa.Table.from_pylist(rows, PROMPT_SCHEMA), kind="prompts", metadata={})


def write_seen_samples(store_uri: str, directory: Path, shown: list[int], *, group: int = 3) -> ShardRef:
    """Write random samples of the prompts."""
    rng, rows = np.random.default_rng(0), []
    for row, each in enumerate(prompts_of(directory, shown)):
        for sample in range(group):
            length = int(rng.integers(1, 8))
            rows.append(
                {
                    "prompt_row": row,
                    "sample": sample,
                    "tokens": [*each.tokens.tolist(), *rng.integers(20, 280, length).tolist()],
                    "num_prompt_tokens": len(each),
                    "images": each.images,
                    "logprobs": (-5.8 + 0.1 * rng.normal(size=length)).tolist(),
                    "advantages": [float(rng.normal())] * length,
                    "staleness": [0] * length,
                }
            )
    return write_shard(open_store(store_uri), pa.Table.from_pylist(rows, SAMPLE_SCHEMA), kind="samples", metadata={})


def seen_work(uri: str, policy: ModelVersion, directory: Path, shown: list[int]) -> UpdateWork:
    """Return the work of an update on random samples of prompts with the given numbers of images."""
    return UpdateWork(
        iteration=0,
        policy=policy,
        reference=policy,
        samples=(write_seen_samples(f"{uri}/run", directory, shown),),
        total_iterations=2,
        seed=0,
        kl_coefficient=0.1,
        media=(write_media(f"{uri}/run"),),
    )
