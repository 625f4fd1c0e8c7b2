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

from infra.errors import BadInput
from models.config.attention import FLASH, describe_missing_package

FUNCTION: Final = "flash_attn_varlen_func"


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
        assert options.get("s_aux") is None, "check_attention rejects models with attention sinks"
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


def attentions_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the attention implementations that the model's class supports."""
    if not model._can_set_attn_implementation():
        return (model.config._attn_implementation,)
    compatible = getattr(model, "_compatible_flash_implementations", None)
    flash = [name for name in FLASH if model._supports_flash_attn and (compatible is None or name in compatible)]
    return (*(("sdpa",) if model._supports_sdpa else ()), "eager", *flash)
