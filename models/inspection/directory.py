"""Description of models before anything is built, from the sizes of a decoder or the files of a directory.

Only the configuration and the headers of weights are read, and torch is not imported. This works for plain directories:
a decoder of a known kind, saved by transformers, with complete weights in the shapes of its configuration. All other
directories, and errors, are left to models/modeling/directory.py, which takes seconds to import.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import check_function, find_target
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.variants import check_implementation
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.images import PixelLimits
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import DirectoryPolicy, MergePolicy, ModelShape, PolicySource, ScratchPolicy
from rheostat.models.engines.requests import generation_settings, stated_ends
from rheostat.models.inspection.plain import DecoderSizes, read_plain
from rheostat.models.text.tokenizer import find_chosen_pad_token, train_tokenizer
from rheostat.models.untrusted_files.directory import check_untrusted_files
from rheostat.models.vision.pixels import load_limited_processor
from rheostat.models.vision.processor import VisionProcessor

if TYPE_CHECKING:  # importing it takes seconds
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Inspected:
    """Description of a policy or another model before its weights are loaded."""

    shape: ModelShape
    outline: ModelOutline
    tokenizer: PreTrainedTokenizerFast
    critic: Callable[[], ModelOutline]
    """Function that returns the size and structure of a critic, which is the model's decoder with a classifier head of
    one output. Raises BadInput if transformers has no such class."""
    load_processor: Callable[[PixelLimits], VisionProcessor | None] = lambda limits: None
    """Function that loads the model's image processor with limits on the number of pixels. Returns None for text-only
    models."""
    check_drawing: Callable[[DenoisingConfig, Iterable[tuple[str, str]]], int] = lambda denoising, prompts: 0
    """Function that checks image generation and returns the number of tokens that training processes for one image. Its
    arguments are the denoising settings and pairs of a prompt and its origin. Raises BadInput if the model cannot
    generate such images, or if a prompt is too long."""

    require_process_model: Callable[[], None] = lambda: None
    """Function that raises BadInput if no process reward model can be built from the model's decoder."""
    ends: tuple[int, ...] = ()
    """Tokens that end a completion according to the model's generation_config.json."""

    def sizes(self) -> dict[str, float]:
        """Return the sizes of the model from which time and memory are estimated, by name."""
        shape = self.shape
        return {
            "parameters": shape.parameters,
            "context": shape.context,
            "matmul_parameters": self.outline.matmul_parameters,
            "layers": shape.layers,
            "query_width": shape.heads * shape.head_size,
            "kv_values_per_token": shape.cached_numbers,
            **({"slow_chunk_tokens": shape.slow_chunk_tokens} if shape.slow_chunk_tokens else {}),
            **({"chosen_pad_token": pad} if (pad := find_chosen_pad_token(self.tokenizer)) is not None else {}),
        }


class Inspection(Protocol):
    """Function that describes the policy for one value of `policy.kind` before the policy is created. `inspect_policy`
    calls it."""

    def __call__(self, policy: Any, texts: Iterable[str], /) -> Inspected:  # noqa: ANN401 -- its own settings
        """Return the description of the policy. If it needs a new tokenizer, the tokenizer is trained on `texts`.
        Raises BadInput if the policy cannot be used."""
        ...


def inspect_policy(policy: PolicySource, texts: Iterable[str]) -> Inspected:
    """Describe the initial policy of a run before it is created. If it needs a new tokenizer, the tokenizer is trained
    on `texts`. Raises BadInput if the policy cannot be trained or cannot generate, or if the code of a user's policy
    cannot be called."""
    where = f"policy {policy.label!r}"
    if not policy.ships_with("models"):  # importing our own writers takes seconds
        check_implementation(policy, "policy", "directory", where="policy", named=("texts", "seed"))
        check_function(policy.inspection, "policy", "texts", where=f"{where}: inspection {policy.inspection!r}")
    found = cast(Inspection, find_target(policy.inspection, where=where))(policy, texts)
    if not isinstance(found, Inspected):
        raise BadInput(
            f"{where}: inspection {policy.inspection!r} must return a {Inspected.__module__}.{Inspected.__name__}, but "
            f"it returned {found!r:.80}"
        )
    return found


def inspect_scratch(policy: ScratchPolicy, texts: Iterable[str]) -> Inspected:
    """Train the tokenizer on `texts`, and describe the new decoder that a run would build with this tokenizer."""
    tokenizer = train_tokenizer(texts, vocab_size=policy.vocab_size, context=policy.context)
    return inspect_decoder(DecoderSizes.from_scratch(policy, vocab_size=len(tokenizer)), tokenizer)


def inspect_import(policy: DirectoryPolicy, texts: Iterable[str]) -> Inspected:
    """Describe the policy in the configured directory. `texts` is not used."""
    return inspect_directory(fetch_path(policy.path), is_trained=True, context=policy.context)


def inspect_merge(policy: MergePolicy, texts: Iterable[str]) -> Inspected:
    """Check that the configured policies can be merged, and describe the first one, which has the same shapes as the
    merged policy. `texts` is not used."""
    from rheostat.models.modeling.weighted_sum import compare_parents, find_method, find_parents

    parents, base = find_parents(policy), find_method(policy).base
    compare_parents(parents, unrelated=policy.allow_unrelated, casts=policy.dtype is not None, base=base)
    return inspect_directory(parents[0].path, is_trained=True)


def inspect_decoder(decoder: DecoderSizes, tokenizer: PreTrainedTokenizerFast) -> Inspected:
    """Describe a decoder that has these sizes and uses this tokenizer."""
    return Inspected(decoder.shape(), decoder.outline(), tokenizer, decoder.critic)


def inspect_directory(directory: Path, *, is_trained: bool = False, context: int | None = None) -> Inspected:
    """Describe the model in a directory. `context` is the maximum sequence length if config.json sets none.

    Raises BadInput if the model cannot generate, or if `is_trained` is set and the model cannot be trained.
    """
    check_untrusted_files(directory)
    plain = read_plain(directory) if context is None else None
    inspected = (
        _inspect_built(directory, is_trained=is_trained, context=context) if plain is None else inspect_decoder(*plain)
    )
    has_settings = (directory / "generation_config.json").is_file()
    ends = stated_ends(generation_settings(directory)) if has_settings else ()
    return replace(inspected, load_processor=partial(load_limited_processor, directory), ends=ends)


def inspect_model(
    model: "PreTrainedModel",
    tokenizer: PreTrainedTokenizerFast,
    *,
    source: str,
    parameters: int | None = None,
    context: int | None = None,
    is_trained: bool = True,
) -> Inspected:
    """Describe a transformers model that was built on the `meta` device, so that it has shapes but no weights. `source`
    names the model in messages. `parameters` is its number of parameters if it differs from that of `model`, and
    `context` is the maximum sequence length if the model's configuration sets none.

    Raises BadInput if `is_trained` is set and the model cannot be trained.
    """
    from rheostat.models.modeling.adapters import outline
    from rheostat.models.modeling.critic import build_meta_critic
    from rheostat.models.modeling.experts import count_experts
    from rheostat.models.modeling.policy import policy_shape
    from rheostat.models.modeling.process_model import require_token_classifier
    from rheostat.models.modeling.replayed_experts import can_replay
    from rheostat.models.modeling.shared_prompts import may_share_prompts, supports_sequence_parallelism
    from rheostat.models.modeling.support import check_trainable, describe_decoding_conflict, find_slow_chunk

    count = model.num_parameters() if parameters is None else parameters
    shape = policy_shape(model.config, parameters=count, source=source, context=context)
    experts = count_experts(model)
    replays = bool(experts) and can_replay(model)
    slices, packs = supports_sequence_parallelism(model), may_share_prompts(model)
    shape = replace(shape, experts=experts, replays_experts=replays, slices=slices, packs=packs)
    inspected = Inspected(
        shape,
        outline(model),
        tokenizer,
        critic=lambda: outline(build_meta_critic(model.config)),
        require_process_model=lambda: require_token_classifier(model.config),
    )
    if shape.vision_model_type:  # the forward pass of known vision-language models is tested with images
        return inspected
    if is_trained:
        check_trainable(model, source=f"policy {source}")
    conflict, chunk = describe_decoding_conflict(model), find_slow_chunk(model)
    return replace(inspected, shape=replace(shape, decoding_conflict=conflict, slow_chunk_tokens=chunk))


def _inspect_built(directory: Path, *, is_trained: bool, context: int | None) -> Inspected:
    """Describe the model in a directory by building it on the `meta` device. This is needed for directories whose sizes
    cannot be read from config.json alone."""
    from rheostat.models.modeling.directory import check_directory, meta_policy
    from rheostat.models.modeling.support import check_not_quantized

    if is_trained:
        check_not_quantized(directory)
    _, tokenizer, parameters = check_directory(directory)
    return inspect_model(
        meta_policy(directory),
        tokenizer,
        source=str(directory),
        parameters=parameters,
        context=context,
        is_trained=is_trained,
    )
