"""Maximum sequence length of a model, read from the model's config.json. Torch-free."""

from collections.abc import Iterator, Mapping


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
    contexts = [
        original
        for rope in _iter_rope_settings(config)
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su")
        and isinstance(
            original := rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings")),
            int,
        )
    ]
    return min(contexts, default=None)


def _iter_rope_settings(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield all tables with settings of rotary position embeddings (RoPE) in a config.json: one table for all layers,
    or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name)
        if isinstance(settings, Mapping):
            yield settings
            yield from (each for each in settings.values() if isinstance(each, Mapping))
