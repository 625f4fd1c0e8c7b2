"""Variable-length attention kernels for CPUs, with the interfaces of the flash attention packages and of PyTorch."""

import torch


def attend_row(q_QHD, k_KHD, v_KHD, *, scale, causal, window, softcap):
    """Compute attention of one row in float64; the last query is at the position of the last key."""
    groups = q_QHD.shape[1] // k_KHD.shape[1]
    k_KHD, v_KHD = (each.repeat_interleave(groups, 1) for each in (k_KHD, v_KHD))
    scores_HQK = torch.einsum("qhd,khd->hqk", q_QHD, k_KHD) * (q_QHD.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores_HQK = softcap * torch.tanh(scores_HQK / softcap)
    distance = torch.arange(len(k_KHD)) - (torch.arange(len(q_QHD))[:, None] + len(k_KHD) - len(q_QHD))
    mask = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        mask &= distance >= -window[0]
    return torch.einsum("hqk,khd->qhd", scores_HQK.masked_fill(~mask, -torch.inf).softmax(-1), v_KHD)


def reference_kernel(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, **options):
    """Compute the same as `flash_attn_varlen_func`, row by row."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q[0]) == int(cu_seqlens_k[0]) == 0
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])) == (len(q), len(k)), "every token is in a row"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    assert options.pop("deterministic")
    window, softcap, causal = (options.pop(name) for name in ("window_size", "softcap", "causal"))
    assert not options
    rows = zip(q.double().split(queries), k.double().split(keys), v.double().split(keys), strict=True)
    outputs = [attend_row(*row, scale=softmax_scale, causal=causal, window=window, softcap=softcap) for row in rows]
    return torch.cat(outputs).to(q.dtype)


def reference_varlen(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """Compute the same as `torch.nn.attention.varlen.varlen_attn` of PyTorch 2.13, row by row, with its checks."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return reference_varlen_without_gqa(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def reference_varlen_without_gqa(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """Compute the same as `torch.nn.attention.varlen.varlen_attn` of PyTorch 2.11, which accepts fewer heads of keys
    than of queries without a further argument."""
    assert isinstance(window_size, tuple), "PyTorch compares it with (-1, 0)"
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    assert query.dtype == key.dtype == value.dtype
    return _RememberMode.apply(
        reference_kernel(
            query,
            key,
            value,
            cu_seqlens_q=cu_seq_q,
            cu_seqlens_k=cu_seq_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            softmax_scale=scale,
            causal=window_size[1] == 0,
            window_size=window_size,
            softcap=0.0,
            deterministic=True,
        )
    )


MODES: list[bool] = []
"""Whether PyTorch's deterministic mode was on in each backward pass of the two kernels above."""


class _RememberMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output):
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        MODES.append(torch.are_deterministic_algorithms_enabled())
        return gradient
