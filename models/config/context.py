"""Maximum sequence length of a model, and settings of longrope models, read from the model's config.json.
Torch-free."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LongropeScale:
    """Factor by which transformers and vLLM multiply the cosines and sines of rotary positions, in a longrope model
    with its short factors."""

    trained: float
    """Factor in transformers 5.23, which the trainer uses."""
    served: float
    """Factor in vLLM 0.32. vLLM ignores the keys `factor` and `attention_factor`."""
    keys: tuple[str, ...]
    """Settings in config.json on which one of the two factors depends."""


def usable_context(longest: int | None, config: Mapping[str, object]) -> int | None:
    """Return the maximum sequence length of a model in tokens, or None if the model has no limit. `longest` is the
    limit in the text part of its config.json, and `config` the whole file.

    Configurations of MPT name this limit `max_seq_len`. A longrope model (arXiv 2402.13753) scales rotary positions by
    short factors up to the context length of its original training, and by long factors beyond. transformers selects
    the factors by the longest sequence of a forward pass, vLLM by `max_model_len`. With long factors, log-probs would
    therefore depend on the other sequences of a forward pass, so such a model is limited to its original context
    length.
    """
    if longest is None and isinstance(limit := config.get("max_seq_len"), int):
        longest = limit
    original = longrope_context(config)
    return longest if longest is None or original is None else min(longest, original)


def longrope_context(config: Mapping[str, object]) -> int | None:
    """Return the original context length of a longrope model (`original_max_position_embeddings`), up to which it uses
    its short factors. Return None for other models."""
    return min((original for _, original in _iter_longrope_settings(config)), default=None)


def longrope_scales(config: Mapping[str, object]) -> list[LongropeScale]:
    """Return the scales of a longrope model, one for each table of rotary settings in its config.json. Return an empty
    list for other models.

    Without settings, both libraries compute sqrt(1 + ln s / ln L), with the original context length L and the ratio s =
    max_position_embeddings / L (arXiv 2402.13753). transformers reads `attention_factor`, else it takes s from
    `factor`; its class for `phimoe` reads `short_mscale`. vLLM reads `short_mscale`. The key `long_mscale` has no
    effect, because Rheostat uses only the short factors.
    """
    scales = []
    for rope, original in _iter_longrope_settings(config):
        ratio = _number(config.get("max_position_embeddings"), original) / original
        served = _number(rope.get("short_mscale"), _attention_scale(ratio, original))
        trained = _attention_scale(_number(rope.get("factor"), ratio), original)
        trained = served if config.get("model_type") == "phimoe" else _number(rope.get("attention_factor"), trained)
        keys = tuple(key for key in ("factor", "attention_factor", "short_mscale") if rope.get(key) is not None)
        scales.append(LongropeScale(trained, served, keys))
    return scales


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _attention_scale(ratio: float, original: int) -> float:
    return 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))


def _iter_longrope_settings(config: Mapping[str, object]) -> Iterator[tuple[Mapping[str, object], int]]:
    """Yield each table with settings of longrope in a config.json, with its original context length."""
    for rope in _iter_rope_settings(config):
        original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su") and isinstance(original, int):
            yield rope, original


def _iter_rope_settings(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield all tables with settings of rotary position embeddings (RoPE) in a config.json: one table for all layers,
    or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name)
        if isinstance(settings, Mapping):
            yield settings
            yield from (each for each in settings.values() if isinstance(each, Mapping))
