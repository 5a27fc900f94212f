"""Stands in for FlashAttention 3: its public function for paged caches, with its rules."""

from __future__ import annotations

import torch
from paged import attention, check, gather

calls: list[str] = []


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False,
):  # fmt: skip
    calls.append("kvcache")
    rows = len(cache_seqlens)
    assert q.dim() == 3, "with cu_seqlens_q, queries of all rows lie one after the other"
    assert k_cache.dtype == v_cache.dtype == q.dtype
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    check(cache_seqlens, torch.int32, rows)
    check(cu_seqlens_q, torch.int32, rows + 1)
    check(page_table, torch.int32, rows, page_table.shape[1])
    assert int(cu_seqlens_q[-1]) == len(q)
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert causal
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    for row in range(rows):
        begin, end, length = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]), int(cache_seqlens[row])
        if end > begin:
            ids = page_table[row, : -(-length // k_cache.shape[1])]
            out[begin:end] = attention(
                q[begin:end], gather(k_cache, ids, length), gather(v_cache, ids, length),
                scale=softmax_scale, window_left=window_size[0], soft_cap=softcap,
            )  # fmt: skip
    return out
