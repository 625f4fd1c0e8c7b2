"""Rewards by CLIP models (arXiv 2103.00020): similarity of a picture and its prompt, or aesthetic quality of the
picture.

PickScore (arXiv 2305.01569) and HPS (arXiv 2306.09341) are CLIP models trained on human preferences. An aesthetic head
uses only the embedding of the picture.
"""

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from shutil import copyfile
from typing import Final, Literal, Protocol

import pyarrow as pa
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

from rheostat.infra.errors import BadInput
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.inputs import fetch_path, format_path
from rheostat.models.config.clip_rewards import ClipReward, ClipSettings
from rheostat.models.config.judges import ClipModel, ClipModelReward
from rheostat.models.data.problems import Problem
from rheostat.models.modeling.directory import copy_directory
from rheostat.models.modeling.policy import first_line, load_weights
from rheostat.models.modeling.reward_model import ScoredTexts
from rheostat.models.records.media import Media
from rheostat.models.records.model_input import image_digests
from rheostat.models.records.work import JudgeWork
from rheostat.models.untrusted_files.directory import check_untrusted_files, missing_directory_error
from rheostat.models.vision.color_conversion import decode_rgb
from rheostat.models.vision.processor import BACKEND, SETTINGS

WHERE: Final = "reward 'clip': path"
HEAD_FILE: Final = "clip_head.safetensors"
"""Name of the file with the head, in the copy of a CLIP model that a run stores."""
OFFLINE: Final = {"local_files_only": True, "trust_remote_code": False}


class PictureReward(Protocol):
    """Reward function that scores the last image of a completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, images: Sequence[bytes] | None = None) -> float:
        """Return the reward."""
        ...


def clip_reward(config: ClipReward) -> PictureReward:
    """Return a reward function that scores the last image of a completion with a CLIP model: by its similarity to the
    prompt or, if configured, by the output of a head on its embedding.

    Images are scored one at a time in float32. Raises BadInput if the model or the head cannot be loaded.
    """
    scorer = ClipScorer(config)

    def reward(prompt: str, completion: str, answer: str, *, images: Sequence[bytes] | None = None) -> float:
        """Return the score of the last picture. Raises ValueError if there is no picture."""
        if not images:
            raise ValueError("the reward 'clip' scores generated pictures, but this completion has none")
        return scorer.score([prompt], [decode_rgb(images[-1])])[0]

    return reward


class ClipScorer:
    """CLIP model with its image processor and tokenizer, and the head if there is one. It scores pictures."""

    def __init__(self, config: ClipSettings, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        """Load the model and test it. Raises BadInput if it cannot be loaded or does not fit its image processor."""
        path, self._value = config.path, config.value
        here = find_clip(path)
        try:
            self._pixels = AutoImageProcessor.from_pretrained(str(here), backend=BACKEND, **OFFLINE)
            self._tokenizer = AutoTokenizer.from_pretrained(str(here), **OFFLINE)
        except Exception as error:  # tokenizers raises Exception itself
            raise _unusable_model(path, f"the processor cannot be loaded: {first_line(error)}") from error
        self._model = load_weights(CLIPModel, here, what=WHERE, device=device, dtype=dtype).eval()
        self._head = None if config.head is None else _load_head(config.head, width=self._model.config.projection_dim)
        self._length = self._model.config.text_config.max_position_embeddings
        self._logit_scale = float(self._model.logit_scale.detach().float().exp())
        side = self._model.config.vision_config.image_size
        try:
            with torch.inference_mode():
                self._embed_text("a picture"), self._embed_images([Image.new("RGB", (side, side))])
        except (ValueError, IndexError, RuntimeError, KeyError) as error:
            raise _unusable_model(path, f"the processor does not fit the model: {first_line(error)}") from error

    @property
    def parameters(self) -> int:
        """Number of parameters of the CLIP model."""
        return int(self._model.num_parameters())

    @torch.inference_mode()
    def score(self, prompts: Sequence[str], images: Sequence[Image.Image]) -> list[float]:
        """Return the score of each image, given its prompt. The images share one forward pass. Scores of the same image
        in batches of different sizes may be rounded differently."""
        embeddings = self._embed_images(images)
        if self._head is not None:
            return [float(self._head(embedding)) for embedding in embeddings]
        texts = {prompt: self._embed_text(prompt) for prompt in dict.fromkeys(prompts)}
        cosines = [float(image @ texts[prompt]) for image, prompt in zip(embeddings, prompts, strict=True)]
        return [cosine * self._logit_scale / 100 for cosine in cosines] if self._value == "logit" else cosines

    def _embed_text(self, text: str) -> Tensor:
        """Embed a text as a unit vector on the CPU. Text beyond the model's context is truncated."""
        tokens = self._tokenizer(text, truncation=True, max_length=self._length, return_tensors="pt")
        tokens = tokens.to(self._model.device)
        features = self._model.get_text_features(tokens["input_ids"], tokens["attention_mask"]).pooler_output
        return _normalize(features[0].float().cpu())

    def _embed_images(self, images: Sequence[Image.Image]) -> list[Tensor]:
        """Embed images as unit vectors on the CPU."""
        pixels = self._pixels(images=[*images], return_tensors="pt")["pixel_values"]
        features = self._model.get_image_features(pixels.to(self._model.device, self._model.dtype)).pooler_output
        return [_normalize(each) for each in features.float().cpu()]


class PictureScorer:
    """CLIP model of the reward `clip_model`, on the device of its worker. Implements `CompletionScorer`."""

    columns = ("prompt", "images")

    def __init__(self, reward: ClipModelReward, directory: Path, device: Literal["cpu", "cuda"]) -> None:
        head = directory / HEAD_FILE
        stored = reward.model.model_copy(update={"path": directory, "head": head if head.is_file() else None})
        self._scorer = ClipScorer(stored, device=device, dtype=getattr(torch, reward.dtype))
        self._batch = 1 if device == "cpu" else reward.batch_pictures

    def score(
        self, rollouts: pa.Table, store: Store, work: JudgeWork, on_pass: Callable[[int, float], None]
    ) -> tuple[list[ScoredTexts], list[int]]:
        """Score the last picture of each completion. Return the scores, and for each the number of pictures that the
        model read."""
        media, prompts = Media(store, work.media), rollouts["prompt"].to_pylist()
        scores = [ScoredTexts(None, "the completion has no picture to score")] * len(prompts)
        last = {row: digests[-1] for row, digests in enumerate(image_digests(rollouts)) if digests}
        waiting = iter(last)
        while rows := [*islice(waiting, self._batch)]:
            started = time.perf_counter()
            images = [decode_rgb(media.encoded(last[row])) for row in rows]
            values = self._scorer.score([prompts[row] for row in rows], images)
            on_pass(len(rows), time.perf_counter() - started)
            for row, value in zip(rows, values, strict=True):
                finite = math.isfinite(value)
                scores[row] = ScoredTexts(value, None) if finite else ScoredTexts(None, f"the model's score is {value}")
        return scores, [int(row in last) for row in range(len(prompts))]


def write_clip_model(
    reward: ClipModelReward, model: ClipModel, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Check a CLIP model in an external directory, copy it into `directory` with its head, and return its number of
    parameters."""
    parameters = ClipScorer(model).parameters
    copy_directory(find_clip(model.path), directory)
    if model.head is not None:
        copyfile(fetch_path(model.head), directory / HEAD_FILE)
    return parameters


def _normalize(embedding: Tensor) -> Tensor:
    """Scale an embedding to length 1, so that dot products are cosine similarities."""
    return torch.nn.functional.normalize(embedding, dim=0)


def find_clip(path: Path) -> Path:
    """Return the local directory of the CLIP model. Raises BadInput if the directory does not contain a CLIP model."""
    here = fetch_path(path)
    if not here.is_dir():
        raise missing_directory_error(WHERE, path)
    check_untrusted_files(here)
    try:
        kind = json.loads((here / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise _unusable_model(path, f"config.json cannot be loaded: {first_line(error)}") from error
    if kind != "clip":
        raise _unusable_model(path, f"config.json has model_type {kind!r}, expected 'clip'")
    if not any((here / name).is_file() for name in SETTINGS):
        raise _unusable_model(path, f"the directory contains neither {' nor '.join(SETTINGS)}")
    if not any((here / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise _unusable_model(path, "the directory contains neither tokenizer.json nor vocab.json")
    return here


def _unusable_model(path: Path, fault: str) -> BadInput:
    """Return the error for a directory that does not contain a usable CLIP model. `fault` is the reason."""
    return BadInput(
        f"{WHERE} {format_path(path)} is not a usable CLIP model: {fault}. Use a complete CLIP model with its image "
        "processor and tokenizer."
    )


def _load_head(path: Path, *, width: int) -> Callable[[Tensor], Tensor]:
    """Load a head that computes a score from an embedding of size `width`. The head consists of linear layers without
    activations, like LAION's aesthetic predictors.

    Raises BadInput if the layers do not map `width` numbers to one number.
    """
    where = f"reward 'clip': head {format_path(path)}"
    try:
        tensors = load_file(fetch_path(path))
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{where}: the file cannot be read as safetensors: {first_line(error)}. Copy or download the file again."
        ) from error
    names = sorted(tensors, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    layers = [(tensors[name].float(), tensors.get(f"{name[:-6]}bias")) for name in names if name.endswith("weight")]
    shapes = [tuple(weight.shape) for weight, _ in layers]
    widths = [width, *(shape[0] for shape in shapes)]
    chained = [shape[1:] == (before,) for shape, before in zip(shapes, widths, strict=False)]
    if not layers or not all(chained) or widths[-1] != 1:
        raise BadInput(
            f"{where}: the file must contain linear layers that lead from {width} inputs, the size of an image "
            f"embedding of this model, to 1 output, but its weights have the shapes {shapes}. Use a head that was "
            "trained for this CLIP model."
        )

    def head(embedding: Tensor) -> Tensor:
        """Apply the layers to an embedding of shape (`width`,) and return a scalar."""
        for weight, bias in layers:
            embedding = torch.nn.functional.linear(embedding, weight, None if bias is None else bias.float())
        return embedding[0]

    return head
