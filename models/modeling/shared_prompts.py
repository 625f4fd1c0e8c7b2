"""Prompt sharing: a prompt that several rows of a micro-batch share is computed only once.

Embeddings, linear layers and norms process every token of a micro-batch once, in a single row of L tokens. Only
attention needs padded rows: keys, values and queries are copied into padded blocks before attention, and the outputs
are collected from the blocks after it. This uses the interface through which transformers looks up attention functions,
so no model code is changed. A flash kernel needs no padding: it is called once per micro-batch, and only keys and
values are copied.

Shapes: L tokens of a micro-batch, P positions of its padded blocks, B rows of a block, T its width, H heads, D values
of a head.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from rheostat.infra.errors import BadInput
from rheostat.models.config.attention import KERNELS, VARLEN, Attention
from rheostat.models.modeling.flash import (
    KernelOptions,
    KernelRows,
    RowsAttention,
    attend_rows,
    attentions_of,
    flash_kernel,
    repeat_tokens,
)
from rheostat.models.modeling.layout import SharedRows, lay_out
from rheostat.models.modeling.sequence_parallel import SequenceParallelGroup
from rheostat.models.modeling.trials import trial_dtype, trial_weights
from rheostat.models.modeling.trunk import find_trunk
from rheostat.models.modeling.varlen import require_varlen, supports_varlen, varlen_kernel
from rheostat.models.records.model_input import ModelInput
from rheostat.models.vision.tower import reads_images, treats_images_as_text

_ENDING: Final = "_of_shared_prompts"
_KERNEL: Final = "rows_"
_AUTO: Final = "sdpa_or_varlen" + _ENDING
"""Name of the attention function that uses PyTorch's variable-length kernel for shared prompts if the device and the
data type of a micro-batch allow it, and sdpa otherwise."""
_PADDED_ATTENTIONS: Final = ("sdpa", "eager")
"""Attention implementations that can be used if rows share prompts. Models with soft caps or attention sinks need
"eager", because sdpa supports neither."""

_MAX_DIFFERENCE: Final = {torch.float32: 1e-4}
"""Maximum relative difference between hidden states computed with and without prompt sharing, by dtype. Sums in another
order cause small differences."""


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Indices of a micro-batch in which shared prompts are stored once (`SharedRows`), as tensors on the device of the
    model."""

    positions_1L: Tensor
    """Position of each token within its sequence. With `sequence_parallel_group`, only tokens in this rank's slice are
    included."""
    places_P: Tensor
    collected_L: Tensor
    blocks: tuple[tuple[int, int], ...]
    keys_K: Tensor
    rows: KernelRows
    tokens: int
    """Number of tokens of the whole micro-batch, without the padding that divides it evenly among ranks."""
    sequence_parallel_group: SequenceParallelGroup | None
    """Ranks that compute the micro-batch's row together, or None if this rank computes it alone."""
    uses_varlen: bool = False
    """Whether the attention function `_AUTO` uses PyTorch's variable-length kernel. Decided by `shared_states`."""

    @property
    def width(self) -> int:
        """Number of tokens of the longest sequence in the micro-batch."""
        return max(width for _, width in self.blocks)


def on_device(
    shared: SharedRows, device: torch.device, *, sequence_parallel_group: SequenceParallelGroup | None = None
) -> SharedTokens:
    """Move the indices of a micro-batch with shared prompts to the device. With `sequence_parallel_group`, `shared` is
    this rank's slice of the micro-batch's row."""
    ends = [np.cumsum((0, *lengths), dtype=np.int32) for lengths in (shared.queries_R, shared.keys_R)]
    query_ends, key_ends = (torch.from_numpy(each).to(device) for each in ends)
    return SharedTokens(
        positions_1L=torch.from_numpy(shared.positions_L)[None].to(device),
        places_P=torch.from_numpy(shared.places_P).to(device),
        collected_L=torch.from_numpy(shared.collected_L).to(device),
        blocks=shared.blocks,
        keys_K=torch.from_numpy(shared.keys_K).to(device),
        rows=KernelRows(query_ends, key_ends, int(shared.queries_R.max()), int(shared.keys_R.max())),
        tokens=int(shared.queries_R.sum()),
        sequence_parallel_group=sequence_parallel_group,
    )


_READING: ContextVar[SharedTokens | None] = ContextVar("_READING", default=None)


@contextmanager
def use_shared_tokens(shared: SharedTokens) -> Iterator[None]:
    """Run the block with attention layers of all models using `shared`, the indices of the tokens that are
    processed."""
    token = _READING.set(shared)
    try:
        yield
    finally:
        _READING.reset(token)


def capture_shared_tokens() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that enters the current `use_shared_tokens` context again. A backward pass that recomputes
    layers on another thread needs it."""
    shared = _READING.get()
    return nullcontext if shared is None else partial(use_shared_tokens, shared)


def shared_states(
    model: PreTrainedModel, tokens_1L: Tensor, shared: SharedTokens, *, options: Mapping[str, object] | None = None
) -> Tensor:
    """Return the last hidden state of every token of `tokens_1L`, a single row in which shared prompts are stored once.
    `options` are further arguments of the model's forward pass."""
    placed = {**(options or {}), "position_ids": shared.positions_1L}
    uses_varlen = model.config._attn_implementation == _AUTO and supports_varlen(tokens_1L.device, trial_dtype(model))
    with use_shared_tokens(replace(shared, uses_varlen=uses_varlen)):
        output = find_trunk(model)(
            input_ids=tokens_1L,
            attention_mask=torch.ones_like(tokens_1L),  # without a mask, restarting positions would be read as one
            use_cache=False,
            **placed,
        )
    states_LH: Tensor = output.last_hidden_state[0]
    return states_LH


def _compute_eager_attention(module: nn.Module, *states: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Compute attention by the eager implementation in the transformers modeling file of this module."""
    written_out = sys.modules[type(module).__module__].eager_attention_forward
    return cast(tuple[Tensor, Tensor], written_out(module, *states, **options))


def _attention(
    inside: Callable[..., tuple[Tensor, object]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 -- whatever the model passes on
) -> tuple[Tensor, None]:
    shared = _READING.get()
    if shared is None:
        output, _ = inside(module, query, key, value, attention_mask, **options)
        return output, None
    sizes, states = [rows * width for rows, width in shared.blocks], [query, key, value]
    if shared.sequence_parallel_group is not None:
        states = [shared.sequence_parallel_group.gather_tokens(each) for each in states]
    spread_PHD = [each[0].transpose(0, 1).index_select(0, shared.places_P) for each in states]
    outputs: list[Tensor] = []
    parts = zip(shared.blocks, *(torch.split(each, sizes) for each in spread_PHD), strict=True)
    for (rows, width), *states_PHD in parts:
        states_BHTD = [each.unflatten(0, (rows, width)).transpose(1, 2) for each in states_PHD]
        mask = None if attention_mask is None else attention_mask[..., :width, :width]
        output_BTHD, _ = inside(module, *states_BHTD, mask, **options)
        outputs.append(output_BTHD.flatten(0, 1))
    output_PHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    output_1LHD = output_PHD.index_select(0, shared.collected_L)[None]
    return output_1LHD if shared.sequence_parallel_group is None else shared.sequence_parallel_group.gather_heads(
        output_1LHD
    ), None


def _by_kernel(
    kernel: RowsAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 -- whatever the model passes on
) -> tuple[Tensor, None]:
    shared, states = _READING.get(), [query, key, value]
    sequence_parallel_group = None if shared is None else shared.sequence_parallel_group
    if sequence_parallel_group is not None:
        states = [sequence_parallel_group.gather_tokens(each) for each in states]
    rows, heads, width, _ = states[0].shape
    query_QHD, key_KHD, value_KHD = (each.transpose(1, 2).flatten(0, 1) for each in states)
    if shared is not None:
        query_QHD = query_QHD[: shared.tokens]  # the padding of slices is at the end
        key_KHD, value_KHD = (repeat_tokens(each, shared.keys_K) for each in (key_KHD, value_KHD))
    ends = KernelRows.from_padded(rows, width, query.device) if shared is None else shared.rows
    output_QHD = attend_rows(kernel, (query_QHD, key_KHD, value_KHD), ends, KernelOptions.from_module(module, options))
    filled_QHD = functional.pad(output_QHD, (0, 0, 0, 0, 0, rows * width - len(output_QHD)))
    output_BTHD = filled_QHD.reshape(rows, width, heads, -1)
    return output_BTHD if sequence_parallel_group is None else sequence_parallel_group.gather_heads(output_BTHD), None


def _by_varlen_or_sdpa(module: nn.Module, *states: Tensor, **options: Any) -> tuple[Tensor, None]:  # noqa: ANN401
    shared = _READING.get()
    uses_varlen = shared is not None and shared.uses_varlen
    attend = partial(_by_kernel, varlen_kernel()) if uses_varlen else partial(_attention, sdpa_attention_forward)
    return attend(module, *states, **options)


def _mask_for_varlen_or_sdpa(*sizes: int, **options: Any) -> Tensor | None:  # noqa: ANN401
    shared = _READING.get()
    return None if shared is not None and shared.uses_varlen else _mask(sdpa_mask, *sizes, **options)


def _build_no_mask(*sizes: object, **options: object) -> None:
    """Return None instead of an attention mask. Attention is causal without a mask here, and padding comes after all
    tokens that are used."""


def _mask(
    inside: Callable[..., Tensor | None],
    batch_size: int,
    q_length: int,
    kv_length: int,
    **options: Any,  # noqa: ANN401
) -> Tensor | None:
    shared = _READING.get()
    if shared is not None:
        batch_size, q_length, kv_length, options["attention_mask"] = 1, shared.width, shared.width, None
    return inside(batch_size, q_length, kv_length, **options)


for _name, _inside, _masks in (
    ("sdpa", sdpa_attention_forward, sdpa_mask),
    ("eager", _compute_eager_attention, eager_mask),
):
    AttentionInterface.register(_name + _ENDING, partial(_attention, _inside))
    AttentionMaskInterface.register(_name + _ENDING, partial(_mask, _masks))
AttentionInterface.register(_AUTO, _by_varlen_or_sdpa)
AttentionMaskInterface.register(_AUTO, _mask_for_varlen_or_sdpa)


def _mixes_in_attention(model: PreTrainedModel) -> bool:
    """Return whether a model combines tokens only in attention and uses positions as they are passed. The types of its
    modules decide."""
    takes = signature(find_trunk(model).forward).parameters
    takes_positions = "position_ids" in takes and treats_images_as_text(model)
    convolves = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return takes_positions and not convolves


def may_share_prompts(model: PreTrainedModel) -> bool:
    """Return whether a model may support shared prompts, according to checks that need no trial."""
    return model.config._attn_implementation.removesuffix(_ENDING) in _PADDED_ATTENTIONS and _mixes_in_attention(model)


def supports_sequence_parallelism(model: PreTrainedModel) -> bool:
    """Return whether a model's attention heads may be divided among ranks, as far as this can be decided without a
    trial. Models with attention sinks are excluded, because the sink weights of a layer contain one number per head,
    and every rank holds them for all heads."""
    return _mixes_in_attention(model) and not any(name.endswith("sinks") for name, _ in model.named_parameters())


def set_attention(model: PreTrainedModel, attention: Attention | None) -> bool:
    """Set a model's attention implementation, or keep the default if `attention` is None. Return whether rows of a
    micro-batch may share prompts with this model. Raises BadInput if the model's class does not support the
    implementation, if a kernel is not installed, or if the GPU does not support it."""
    if attention is None:
        return enable_shared_prompts(model)
    if attention == "auto":
        return _set_default_attention(model)
    if attention not in attentions_of(model):
        raise BadInput(
            f"update.attention is {attention!r}, but {type(model).__name__} does not support it. Use 'sdpa', or "
            "remove the key"
        )
    if attention in KERNELS:
        kernel = require_varlen() if attention == VARLEN else flash_kernel(attention)
        return use_attention_kernel(kernel, model, name=_KERNEL + attention.removeprefix("flash_attention_"))
    model.set_attn_implementation(attention)
    return enable_shared_prompts(model)


def _set_default_attention(model: PreTrainedModel) -> bool:
    """Let a text model use PyTorch's variable-length kernel for shared prompts. Every micro-batch decides by its device
    and data type whether the kernel is used. Other models keep their default attention. Return whether rows of a
    micro-batch may share prompts with this model."""
    shares = enable_shared_prompts(model)
    is_supported = VARLEN in attentions_of(model) and not reads_images(model)
    if is_supported and model.config._attn_implementation == "sdpa" + _ENDING:
        model.set_attn_implementation(_AUTO)
    return shares


def uses_attention_kernel(model: PreTrainedModel) -> bool:
    """Return whether the attention of a model is a flash kernel, which needs 16-bit numbers."""
    return bool(model.config._attn_implementation.startswith(_KERNEL))


def use_attention_kernel(kernel: RowsAttention, model: PreTrainedModel, *, name: str) -> bool:
    """Set a flash kernel as a model's attention. Return whether rows of a micro-batch may share prompts with this
    model. The trial that decides this uses the model's default attention, on any device, because the result depends
    only on the other layers. `name` must not contain `flash`, or transformers would look for a kernel itself."""
    shares = enable_shared_prompts(model)
    AttentionInterface.register(name, partial(_by_kernel, kernel))
    AttentionMaskInterface.register(name, _build_no_mask)
    model.set_attn_implementation(name)
    return shares


def enable_shared_prompts(model: PreTrainedModel) -> bool:
    """Let a model compute a prompt that several rows share only once, if the model supports this. Return whether it
    does.

    A model supports shared prompts if it combines tokens only in functions of the attention interface. A trial checks
    this by comparing states of shared and padded rows. Models with convolutions are excluded without a trial: recurrent
    layers contain one, and its effect on the states may be too small to be noticed.
    """
    inside = model.config._attn_implementation
    if inside.endswith(_ENDING):
        return True
    if not may_share_prompts(model):
        return False
    model.set_attn_implementation(inside + _ENDING)
    try:
        with trial_weights(model):
            shares = matches_padded_rows(model)
    except RuntimeError:  # a class that computes its own masks, such as Doge, cannot read rows of other lengths
        shares = False
    if not shares:
        model.set_attn_implementation(inside)
    return shares


@torch.no_grad()
def matches_padded_rows(
    model: PreTrainedModel, *, sequence_parallel_group: SequenceParallelGroup | None = None
) -> bool:
    """Return whether a trial gives the same states for a single row in which shared prompts are stored once as for
    padded rows. With `sequence_parallel_group`, the single row is divided among the ranks. Collective in this case: all
    ranks of the group must call this."""
    prompt, other = ModelInput.from_prompt([1, 2, 3]), ModelInput.from_prompt([3, 1])
    batch = lay_out(
        [prompt.append_completion([2, 0, 1, 3]), prompt.append_completion([0]), other.append_completion([1, 2]), prompt]
    )
    assert batch.shared is not None, "rows with one prompt share it"
    device = model.device
    tokens_BT, positions_N = torch.from_numpy(batch.tokens_BT).to(device), torch.from_numpy(batch.positions_N)
    expected_BTH = find_trunk(model)(input_ids=tokens_BT, use_cache=False).last_hidden_state
    row, own_M = (
        (batch.shared, None) if sequence_parallel_group is None else sequence_parallel_group.slice_row(batch.shared)
    )
    tokens_1L = torch.from_numpy(row.tokens_L)[None].to(device)
    actual_LH = shared_states(model, tokens_1L, on_device(row, device, sequence_parallel_group=sequence_parallel_group))
    expected_NH = expected_BTH.flatten(0, 1)[positions_N.to(device)].float()
    actual_NH = actual_LH[torch.from_numpy(row.predicting_N).to(device)].float()
    if sequence_parallel_group is not None and own_M is not None:
        actual_NH = sequence_parallel_group.gather_outputs(
            actual_NH, torch.from_numpy(own_M).to(device), num_tokens=len(expected_NH)
        )
    difference = (actual_NH - expected_NH).abs().max() / expected_NH.abs().max().clamp(min=1e-6)
    return bool(difference < _MAX_DIFFERENCE.get(trial_dtype(model), 5e-2))
