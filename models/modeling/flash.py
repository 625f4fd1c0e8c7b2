"""Attention by a kernel for rows of many lengths, as the flash packages bring one.

It takes rows one after another without padding, each with as many queries as it asks for: of a pass in which prompts
are shared, a prompt's queries stand in the first of its rows alone, its keys and values in each of them.

Shapes: B rows of a padded pass, T its width, Q queries and K keys of all rows, R rows, H heads, D numbers of a head.
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
from models.config.attention import FLASH, lacks

FUNCTION: Final = "flash_attn_varlen_func"


class RowsAttention(Protocol):
    """Causal attention of rows of many lengths, by the arguments of flash's `flash_attn_varlen_func`.

    Rows end at the cumulative sums; the last query of a row stands at its last key. A window counts tokens before and
    after a query's own, -1 all; a soft cap of 0 is none.
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
        """Return what each query is told; some versions return more behind it."""
        ...


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Where rows end, as a kernel is told; int32, and from 0 on."""

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def padded(cls, rows: int, width: int, device: torch.device) -> Self:
        """Rows of one width, which ask for all of it."""
        ends = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=device)
        return cls(query_ends=ends, key_ends=ends, most_queries=width, most_keys=width)


def flash_kernel(attention: str) -> RowsAttention:
    """Import a kernel. Raises BadInput where its package is not there: none is fetched from anywhere."""
    package = FLASH[attention]
    if (reason := lacks(package)) is not None:
        raise BadInput(f"update.attention {attention!r}: {reason}")
    try:
        return cast(RowsAttention, getattr(import_module(package.module), FUNCTION))
    except (ImportError, AttributeError, OSError) as error:  # built for another torch, or another CUDA
        raise BadInput(f"update.attention {attention!r}: {package.distribution} does not import: {error}") from error


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What a model's layer passes on beside its states."""

    causal: bool
    scaling: float | None
    window: tuple[int, int]
    softcap: float

    @classmethod
    def of(cls, module: nn.Module, options: Mapping[str, Any]) -> Self:
        """Read what transformers' layers call them."""
        assert options.get("s_aux") is None, "models with sinks are refused before"
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
    """Return what every query is told; states are queries (QHD), keys and values (KHD)."""
    query_QHD, key_KHD, value_KHD = states
    size = value_KHD.shape[-1]
    said = kernel(
        query_QHD.to(value_KHD.dtype),  # rotated, or normalised, in another precision by some models
        key_KHD.to(value_KHD.dtype),
        F.pad(value_KHD, (0, query_QHD.shape[-1] - size)),  # latent attention's values are shorter than its keys
        cu_seqlens_q=rows.query_ends,
        cu_seqlens_k=rows.key_ends,
        max_seqlen_q=rows.most_queries,
        max_seqlen_k=rows.most_keys,
        softmax_scale=options.scaling,
        causal=options.causal,
        window_size=options.window,
        softcap=options.softcap,
        deterministic=True,  # the same work gives the same bits
    )
    return (said[0] if isinstance(said, tuple) else said)[..., :size]


def attentions_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Name the ways in which a model's class can compute attention."""
    if not model._can_set_attn_implementation():
        return (model.config._attn_implementation,)
    own = getattr(model, "_compatible_flash_implementations", None)
    flash = [name for name in FLASH if model._supports_flash_attn and (own is None or name in own)]
    return (*(("sdpa",) if model._supports_sdpa else ()), "eager", *flash)
