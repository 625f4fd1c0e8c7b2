"""Variable-length attention of PyTorch itself (`torch.nn.attention.varlen`), which needs no other package.

It is the flash attention kernel that is compiled into PyTorch for CUDA. The function `varlen_attn` has no argument for
soft caps, attention sinks or determinism. Its backward pass is deterministic only in PyTorch's deterministic mode.

Shapes: Q queries and K keys of all rows, H heads, D values of a head.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from rheostat.infra.errors import BadInput
from rheostat.models.modeling.flash import RowsAttention

HEAD_MULTIPLE: Final = 8
"""The kernel supports heads whose size is a multiple of this number (`mha_varlen_fwd` in PyTorch's flash_api.cpp).
Other heads are padded with zeros."""
MIN_CAPABILITY: Final = (8, 0)
"""Minimum compute capability of a GPU (Ampere), according to the same file."""
DTYPES: Final = (torch.bfloat16, torch.float16)
"""Data types that the kernel supports, according to the same file."""


def supports_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's variable-length attention supports this device and data type."""
    return device.type == "cuda" and dtype in DTYPES and _find_gpu_conflict(device.index) is None


def require_varlen() -> RowsAttention:
    """Return PyTorch's variable-length attention as a kernel. Raises BadInput if the GPU of this process does not
    support it, or if the process has no GPU."""
    conflict = _find_gpu_conflict() if torch.cuda.is_available() else "this process has no GPU that PyTorch can use"
    if conflict is not None:
        raise BadInput(f"update.attention is 'varlen', but {conflict}. Set update.attention = 'sdpa'")
    return varlen_kernel()


@functools.cache
def _find_gpu_conflict(index: int | None = None) -> str | None:
    """Return the reason why a GPU, by default the current one, does not support variable-length attention, or None."""
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch contains no flash attention kernel"
    capability = torch.cuda.get_device_capability(index)
    if capability >= MIN_CAPABILITY:
        return None
    found, required = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
    return f"the GPU has compute capability {found}, and the kernel needs {required} or higher"


@functools.cache
def varlen_kernel() -> RowsAttention:
    """Return PyTorch's variable-length attention as a kernel with the interface of flash-attn. Importing it takes a
    second, so it is imported at the first call."""
    from torch.nn.attention.varlen import varlen_attn

    return adapt_varlen(varlen_attn)


def adapt_varlen(attend: Callable[..., Tensor | tuple[Tensor, ...]]) -> RowsAttention:
    """Return a function with the interface of PyTorch's `varlen_attn` as a kernel with the interface of flash-attn."""
    # PyTorch 2.13 requires the argument if keys have fewer heads than queries. PyTorch 2.11 does not have it.
    options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(attend).parameters else {}

    def attend_rows(  # noqa: PLR0913 -- the interface of flash-attn
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
    ) -> Tensor:
        assert not softcap, "attentions_of excludes this kernel for models with soft caps"
        size = q.shape[-1]
        query_QHD, key_KHD, value_KHD = (F.pad(each, (0, -size % HEAD_MULTIPLE)) for each in (q, k, v))
        output_QHD = attend(
            query_QHD,
            key_KHD,
            value_KHD,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            scale=size**-0.5 if softmax_scale is None else softmax_scale,
            window_size=(window_size[0], 0) if causal else window_size,
            **options,
        )
        assert isinstance(output_QHD, Tensor), "a tuple is returned only for return_aux"
        if deterministic:
            make_backward_deterministic(output_QHD)
        return output_QHD[..., :size]

    return attend_rows


def make_backward_deterministic(output: Tensor) -> None:
    """Run the backward pass of the operation that computed `output` in PyTorch's deterministic mode. Other operations
    are not affected: the mode is restored after the backward pass of this operation."""
    if (node := output.grad_fn) is None:
        return
    modes = list[tuple[bool, bool]]()

    def enter(gradients: object) -> None:
        modes.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
        torch.use_deterministic_algorithms(True)

    def leave(*gradients: object) -> None:
        is_enabled, warns_only = modes.pop()
        torch.use_deterministic_algorithms(is_enabled, warn_only=warns_only)

    node.register_prehook(enter)
    node.register_hook(leave)
