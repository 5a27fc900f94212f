"""Stands in for FlashAttention 2: its public function, with its rules."""

from __future__ import annotations

import torch
from paged import attention, check, gather

calls: list[str] = []


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    calls.append("varlen")
    rows = len(cu_seqlens_q) - 1
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k.dtype == v.dtype == q.dtype
    assert k.shape == v.shape
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert q.shape[1] % k.shape[2] == 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    check(cu_seqlens_q, torch.int32, rows + 1)
    check(cu_seqlens_k, torch.int32, rows + 1)
    check(block_table, torch.int32, rows, block_table.shape[1])
    assert int(cu_seqlens_q[0]) == int(cu_seqlens_k[0]) == 0
    assert int(cu_seqlens_q[-1]) == len(q)
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    assert causal
    if alibi_slopes is not None:
        check(alibi_slopes, torch.float32, q.shape[1])
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    for row in range(rows):
        begin, end = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        if end > begin:
            ids = block_table[row, : -(-length // k.shape[1])]
            out[begin:end] = attention(
                q[begin:end], gather(k, ids, length), gather(v, ids, length),
                scale=softmax_scale, window_left=window_size[0], soft_cap=softcap, slopes=alibi_slopes,
            )  # fmt: skip
    assert window_size[1] in (-1, 0)
    return out
