"""Variable-length attention kernel for CPUs, with the interface of the flash attention packages."""

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
