"""Configuration of rewards that CLIP models compute from pictures. Torch-free."""

from typing import Literal, Self

from pydantic import model_validator

from rheostat.infra.config import Settings
from rheostat.infra.store.inputs import Location, ModelLocation
from rheostat.models.config.reward_terms import BuiltInReward


class ClipSettings(Settings):
    """CLIP model, and the score that is computed from its embeddings."""

    path: ModelLocation
    """Directory of a CLIP model with its image processor and tokenizer, on this machine or at s3://bucket/name, or a
    name on the Hub."""
    value: Literal["cosine", "logit"] = "cosine"
    """Score: "cosine" is the cosine similarity of the picture's and the prompt's embeddings, from -1 to 1. "logit" is
    this similarity times the CLIP model's logit scale, divided by 100."""
    head: Location | None = None
    """Safetensors file of linear layers that map the normalized image embedding to one number, which is the score. If
    not set, the score compares the picture with the prompt."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest score: -1 and 1 for a cosine similarity, None for logits and for a head."""
        return (-1.0, 1.0) if self.value == "cosine" and self.head is None else None

    @model_validator(mode="after")
    def _require_one_score(self) -> Self:
        if self.head is not None and self.value == "logit":
            raise ValueError(
                "value = 'logit' cannot be combined with head, because head already converts the image embedding to "
                "the score. Remove one of them"
            )
        return self


class ClipReward(ClipSettings, BuiltInReward):
    """Score of the last generated picture by a CLIP model: its similarity to the prompt (such as PickScore or HPS), or
    the output of an additional head on the picture's embedding.

    The score is computed on the CPU in the scoring worker. The reward `clip_model` runs the same model in worker slots,
    which may have GPUs. A prompt longer than the CLIP model's context is truncated.
    """

    implementation = "rheostat.models.rewards.clip:clip_reward"
    example = '{ kind = "clip", path = "models/pickscore", value = "logit" }'

    kind: Literal["clip"] = "clip"

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values. This is always true."""
        return True

    @property
    def uses_images(self) -> bool:
        """Whether this reward reads images: always true."""
        return True
