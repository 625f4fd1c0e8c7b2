"""Rewards by CLIP models (arXiv 2103.00020): similarity of a picture and its prompt, or aesthetic quality of the
picture.

PickScore (arXiv 2305.01569) and HPS (arXiv 2306.09341) are CLIP models trained on human preferences. An aesthetic head
uses only the embedding of the picture.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

from infra.errors import BadInput
from infra.store.inputs import fetch_path, format_path
from models.config.reward_terms import ClipReward
from models.modeling.policy import first_line, load_weights
from models.rewards.painting import PictureReward
from models.untrusted_files.directory import check_untrusted_files, missing_directory_error
from models.vision.color_conversion import decode_rgb
from models.vision.processor import BACKEND, SETTINGS

WHERE: Final = "reward 'clip': path"
OFFLINE: Final = {"local_files_only": True, "trust_remote_code": False}


def clip_reward(config: ClipReward) -> PictureReward:
    """Return a reward function that scores the last image of a completion with a CLIP model: by its similarity to the
    prompt or, if configured, by the output of a head on its embedding.

    Images are scored one at a time in float32. Raises BadInput if the model or the head cannot be loaded.
    """
    scorer = _Scorer(config.path)
    head = None if config.head is None else _load_head(config.head, width=scorer.width)

    def reward(prompt: str, completion: str, answer: str, *, images: Sequence[bytes] | None = None) -> float:
        """Return the score of the last picture. Raises ValueError if there is no picture."""
        if not images:
            raise ValueError("the reward 'clip' scores generated pictures, but this completion has none")
        with torch.inference_mode():
            embedding = scorer.image(decode_rgb(images[-1]))
            if head is not None:
                return float(head(embedding))
            cosine = float(embedding @ scorer.text(prompt))
        return cosine * scorer.logit_scale / 100 if config.value == "logit" else cosine

    return reward


class _Scorer:
    """CLIP model with its image processor and tokenizer, which embeds texts and images."""

    def __init__(self, path: Path) -> None:
        """Load the model and test it. Raises BadInput if it cannot be loaded or does not fit its image processor."""
        here = _find_directory(path)
        try:
            self._pixels = AutoImageProcessor.from_pretrained(str(here), backend=BACKEND, **OFFLINE)
            self._tokenizer = AutoTokenizer.from_pretrained(str(here), **OFFLINE)
        except Exception as error:  # tokenizers raises Exception itself
            raise _unusable_model(path, f"the processor cannot be loaded: {first_line(error)}") from error
        self._model = load_weights(CLIPModel, here, what=WHERE, device="cpu", dtype=torch.float32).eval()
        self._length = self._model.config.text_config.max_position_embeddings
        self.width: int = self._model.config.projection_dim
        self.logit_scale = float(self._model.logit_scale.detach().exp())
        side = self._model.config.vision_config.image_size
        try:
            with torch.inference_mode():
                self.text("a picture"), self.image(Image.new("RGB", (side, side)))
        except (ValueError, IndexError, RuntimeError, KeyError) as error:
            raise _unusable_model(path, f"the processor does not fit the model: {first_line(error)}") from error

    def text(self, text: str) -> Tensor:
        """Embed a text as a unit vector. Text beyond the model's context is truncated."""
        tokens = self._tokenizer(text, truncation=True, max_length=self._length, return_tensors="pt")
        return _normalize(self._model.get_text_features(tokens["input_ids"], tokens["attention_mask"]).pooler_output[0])

    def image(self, image: Image.Image) -> Tensor:
        """Embed an image as a unit vector."""
        pixels = self._pixels(images=image, return_tensors="pt")["pixel_values"]
        return _normalize(self._model.get_image_features(pixels).pooler_output[0])


def _normalize(embedding: Tensor) -> Tensor:
    """Scale an embedding to length 1, so that dot products are cosine similarities."""
    return torch.nn.functional.normalize(embedding, dim=0)


def _find_directory(path: Path) -> Path:
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
