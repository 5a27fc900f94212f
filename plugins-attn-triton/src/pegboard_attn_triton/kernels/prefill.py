"""Attention of rows with any number of new tokens, after any number of cached ones."""

from __future__ import annotations

import triton
import triton.language as tl

from pegboard_attn_triton.kernels.common import attend_tile, key_scale_of, with_sink

_PER_STEP = ["table", "seq_lens", "query_start", "tile_rows", "tile_starts"]


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=_PER_STEP)
def prefill_kernel(
    query,
    cache,
    out,
    table,
    seq_lens,
    query_start,
    tile_rows,
    tile_starts,
    slopes,
    sinks,
    key_scale,
    value_scale,
    scale,
    soft_cap,
    stride_query_token,
    stride_query_head,
    stride_out_token,
    stride_out_head,
    stride_block,
    stride_table,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (i, head): ``BLOCK_M // GROUP`` of the new tokens of row ``tile_rows[i]``, from its ``tile_starts[i]``-th on, with
    all query heads of one key head. Heads lie side by side within a token, so any group size fills the tile."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_starts + tile)
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    prefix = tl.load(seq_lens + row) - count

    TOKENS: tl.constexpr = BLOCK_M // GROUP
    member = tl.arange(0, BLOCK_M)
    token = first + member // GROUP
    heads = head * GROUP + member % GROUP
    real = (member < TOKENS * GROUP) & (token < count)
    position = prefix + token
    dims = tl.arange(0, HEAD_PAD)
    inside = real[:, None] & (dims < HEAD)[None, :]
    at_token = (begin + token).to(tl.int64)[:, None]
    queries = query + at_token * stride_query_token + heads[:, None] * stride_query_head + dims[None, :]
    q = tl.load(queries, mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + heads, mask=real, other=0.0)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    scale = scale * key_scale_of(key_scale, head, KEY_SCALES)
    row_table = table + row.to(tl.int64) * stride_table

    high = prefix + tl.minimum(first + TOKENS, count)
    low = 0
    if WINDOW:
        # blocks that hold nothing from here on may belong to somebody else by now
        low = tl.maximum(prefix + first - WINDOW + 1, 0)
    else:
        # keys that every query of the tile sees need no mask
        low = (prefix + first + 1) // BLOCK_N * BLOCK_N
        for start in range(0, low, BLOCK_N):
            acc, top, total = attend_tile(
                q, acc, top, total, cache, row_table, stride_block, head, start, high, position, scale, soft_cap, slope,
                KV_HEADS, BLOCK_SIZE, HEAD, HEAD_PAD, BLOCK_N,
                BOUNDED=False, CAUSAL=False, WINDOW=0, SOFT_CAP=SOFT_CAP, ALIBI=ALIBI,
            )  # fmt: skip
    for start in range(low, high, BLOCK_N):
        acc, top, total = attend_tile(
            q, acc, top, total, cache, row_table, stride_block, head, start, high, position, scale, soft_cap, slope,
            KV_HEADS, BLOCK_SIZE, HEAD, HEAD_PAD, BLOCK_N,
            BOUNDED=True, CAUSAL=True, WINDOW=WINDOW, SOFT_CAP=SOFT_CAP, ALIBI=ALIBI,
        )  # fmt: skip

    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0)
        acc, top, total = with_sink(acc, top, total, sink)
    result = acc / total[:, None] * key_scale_of(value_scale, head, VALUE_SCALES)
    place = out + at_token * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)
