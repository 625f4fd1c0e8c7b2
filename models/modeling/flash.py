"""Attention with a flash kernel, for rows of different lengths without padding.

The kernel reads rows one after another, each with its own number of queries. In a micro-batch with shared prompts, the
queries of a prompt are part only of the first row with this prompt, while its keys and values are part of each row.

Shapes: B rows of a padded micro-batch, T its width, Q queries and K keys of all rows, R rows, H heads, D values of a
head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol, Self, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from rheostat.infra.errors import BadInput
from rheostat.models.config.attention import FLASH, HEAD_SIZE, VARLEN, describe_missing_package

FUNCTION: Final = "flash_attn_varlen_func"
_UNSUPPORTED: Final = ("s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Arguments of attention functions for attention sinks, position biases and sparse attention. No kernel has them."""


class RowsAttention(Protocol):
    """Flash kernel for causal attention over rows of different lengths that are concatenated without padding. Its
    arguments are those of flash-attn's `flash_attn_varlen_func`.

    Cumulative lengths mark the ends of rows, and the last query of a row is aligned with its last key. A window is the
    number of tokens before and after a query's own token, where -1 means all. A soft cap of 0 means none.
    """

    def __call__(  # noqa: PLR0913 -- flash's own
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        deterministic: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the attention output of each query. Some versions of the kernel return a tuple whose first element is
        the output. The arguments are those of flash-attn's `flash_attn_varlen_func`."""
        ...


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Ends of the concatenated rows, as a flash attention kernel requires them: cumulative lengths in int32, starting
    at 0."""

    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def from_padded(cls, rows: int, width: int, device: torch.device) -> Self:
        """Return the row ends of a padded micro-batch of `rows` rows. All rows have `width` tokens, and every token is
        a query."""
        ends = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=device)
        return cls(query_ends=ends, key_ends=ends, max_queries=width, max_keys=width)


def flash_kernel(attention: str) -> RowsAttention:
    """Import and return the attention kernel of the flash package that `attention` names. Nothing is downloaded. Raises
    BadInput if the package is not installed or cannot be imported."""
    package = FLASH[attention]
    if (reason := describe_missing_package(package)) is not None:
        raise BadInput(f"update.attention = {attention!r}: {reason}")
    try:
        return cast(RowsAttention, getattr(import_module(package.module), FUNCTION))
    except (ImportError, AttributeError, OSError) as error:  # built for another torch or another CUDA
        raise BadInput(
            f"update.attention is {attention!r}, but its package {package.distribution} cannot be imported: {error}. "
            "Install a build of it for the installed versions of torch and CUDA"
        ) from error


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Attention options of one layer of the model: softmax scale, attention window and soft cap of the scores."""

    causal: bool
    scaling: float | None
    window: tuple[int, int]
    softcap: float

    @classmethod
    def from_module(cls, module: nn.Module, options: Mapping[str, Any]) -> Self:
        """Read the attention options of a layer from the arguments (`options`) and module attributes with which
        transformers calls attention functions."""
        assert all(options.get(name) is None for name in _UNSUPPORTED), "attentions_of excludes models with these"
        causal, window = options.get("is_causal"), options.get("sliding_window")
        return cls(
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            scaling=options.get("scaling"),
            window=(-1, -1) if window is None else (window - 1, 0),  # transformers counts a query's own token too
            softcap=options.get("softcap") or 0.0,
        )


def attend_rows(
    kernel: RowsAttention, states: tuple[Tensor, Tensor, Tensor], rows: KernelRows, options: KernelOptions
) -> Tensor:
    """Compute attention with a flash kernel and return the output of every query. `states` are queries (Q, H, D), keys
    (K, H, D) and values (K, H, D), for H heads of D values. `rows` marks where the concatenated rows end."""
    query_QHD, key_KHD, value_KHD = states
    size = value_KHD.shape[-1]
    output = kernel(
        query_QHD.to(value_KHD.dtype),  # some models rotate or normalize in another precision
        key_KHD.to(value_KHD.dtype),
        F.pad(value_KHD, (0, query_QHD.shape[-1] - size)),  # the values of latent attention are shorter than its keys
        cu_seqlens_q=rows.query_ends,
        cu_seqlens_k=rows.key_ends,
        max_seqlen_q=rows.max_queries,
        max_seqlen_k=rows.max_keys,
        softmax_scale=options.scaling,
        causal=options.causal,
        window_size=options.window,
        softcap=options.softcap,
        deterministic=True,  # the same work gives the same bits
    )
    return (output[0] if isinstance(output, tuple) else output)[..., :size]


class _RepeatTokens(torch.autograd.Function):
    """Gather tokens, some of them repeatedly. The backward pass adds the gradients of repeated tokens in float32 and in
    the same order each time. That of `index_select` adds them in 16 bits and, on GPUs, in a random order."""

    @staticmethod
    def forward(ctx: Any, states_LHD: Tensor, indices_K: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(indices_K)
        ctx.num_tokens = len(states_LHD)
        return states_LHD.index_select(0, indices_K)

    @staticmethod
    def backward(ctx: Any, gradient_KHD: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (indices_K,) = ctx.saved_tensors
        shape = (ctx.num_tokens, *gradient_KHD.shape[1:])
        sum_LHD = torch.zeros(shape, dtype=torch.float32, device=gradient_KHD.device)
        sum_LHD.index_put_((indices_K,), gradient_KHD.float(), accumulate=True)  # sorts the indices on GPUs
        return sum_LHD.to(gradient_KHD.dtype), None


def repeat_tokens(states_LHD: Tensor, indices_K: Tensor) -> Tensor:
    """Return the states of the tokens with these indices, which may contain a token more than once. Gradients are
    bit-identical when repeated, also on GPUs."""
    states_KHD: Tensor = _RepeatTokens.apply(states_LHD, indices_K)  # type: ignore[no-untyped-call]
    return states_KHD


def attentions_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the attention implementations that the model's class supports."""
    if not model._can_set_attn_implementation():
        return (model.config._attn_implementation,)
    compatible = getattr(model, "_compatible_flash_implementations", None)
    flash = [name for name in FLASH if model._supports_flash_attn and (compatible is None or name in compatible)]
    # Like sdpa, PyTorch's kernel supports neither soft caps nor attention sinks.
    varlen = [VARLEN] if model._supports_sdpa and "flash_attention_2" in flash else []
    kernels = (*varlen, *flash) if find_head_size(model) <= HEAD_SIZE else ()
    return (*(("sdpa",) if model._supports_sdpa else ()), "eager", *kernels)


def find_head_size(model: PreTrainedModel) -> int:
    """Return the size of the largest attention head of a model. Layers may differ in this size, and in latent
    attention it is not in config.json."""
    sizes = (getattr(module, name, 0) for module in model.modules() for name in ("head_dim", "qk_head_dim"))
    return max((size for size in sizes if isinstance(size, int)), default=0)
