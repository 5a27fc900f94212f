"""Attention of rows with one new token, each context cut into splits that programs read at the same time; and their sum."""

from __future__ import annotations

import triton
import triton.language as tl

from pegboard_attn_triton.kernels.common import attend_tile, key_scale_of, with_sink

# What changes from step to step is not specialised on: else kernels would be compiled anew for every chance alignment.
_PER_STEP = ["table", "seq_lens", "query_start", "rows"]


@triton.jit
def split_bounds(length, split, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key of a split, and the one after its last: equal parts of what the row's token sees, in whole tiles. The last splits
    of a short row are empty (the first of these numbers is not smaller than the second)."""
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, splits), BLOCK_N) * BLOCK_N
    begin = first + split * share
    return begin, tl.minimum(begin + share, length)


@triton.jit(do_not_specialize=["stride_table", "splits"], do_not_specialize_on_alignment=_PER_STEP)
def decode_kernel(
    query,
    cache,
    out,
    partial,
    stats,
    table,
    seq_lens,
    query_start,
    rows,
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
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (i, head, split): row ``rows[i]``, one key head with all its query heads, one split of the context.

    Without ``SPLIT`` the result goes to ``out``. With it, weighted values go to ``partial`` [rows, heads, splits, HEAD] and
    (largest score, sum of weights) to ``stats`` [rows, heads, splits, 2], float32. For a row of length 0, padding, nothing is
    written.
    """
    index = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + index)
    length = tl.load(seq_lens + row)
    begin, end = split_bounds(length, split, splits, WINDOW, BLOCK_N)
    if begin < end:
        token = tl.load(query_start + row).to(tl.int64)
        member = tl.arange(0, GROUP_PAD)
        heads = head * GROUP + member
        dims = tl.arange(0, HEAD_PAD)
        inside = (member < GROUP)[:, None] & (dims < HEAD)[None, :]
        q = tl.load(
            query + token * stride_query_token + heads[:, None] * stride_query_head + dims[None, :], mask=inside, other=0.0
        )
        if UPCAST:
            q = q.to(tl.float32)
        slope = tl.zeros([GROUP_PAD], tl.float32)
        if ALIBI:
            slope = tl.load(slopes + heads, mask=member < GROUP, other=0.0)
        position = tl.zeros([GROUP_PAD], tl.int32) + (length - 1)
        acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
        top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        scale = scale * key_scale_of(key_scale, head, KEY_SCALES)
        row_table = table + row.to(tl.int64) * stride_table
        for start in range(begin, end, BLOCK_N):
            acc, top, total = attend_tile(
                q, acc, top, total, cache, row_table, stride_block, head, start, end, position, scale, soft_cap, slope,
                KV_HEADS, BLOCK_SIZE, HEAD, HEAD_PAD, BLOCK_N,
                BOUNDED=True, CAUSAL=False, WINDOW=0, SOFT_CAP=SOFT_CAP, ALIBI=ALIBI,
            )  # fmt: skip
        value_factor = key_scale_of(value_scale, head, VALUE_SCALES)
        if SPLIT:
            at = (index.to(tl.int64) * (KV_HEADS * GROUP) + heads) * splits + split
            tl.store(partial + at[:, None] * HEAD + dims[None, :], acc * value_factor, mask=inside)
            tl.store(stats + at * 2, top, mask=member < GROUP)
            tl.store(stats + at * 2 + 1, total, mask=member < GROUP)
        else:
            if SINKS:
                sink = tl.load(sinks + heads, mask=member < GROUP, other=0.0)
                acc, top, total = with_sink(acc, top, total, sink)
            result = acc / total[:, None] * value_factor
            place = out + token * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=_PER_STEP[1:])
def reduce_kernel(
    out,
    partial,
    stats,
    seq_lens,
    query_start,
    rows,
    sinks,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (i, head): sum up what the splits of row ``rows[i]`` have left, for one query head."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(rows + index)
    length = tl.load(seq_lens + row)
    if length > 0:
        split = tl.arange(0, SPLITS)
        begin, end = split_bounds(length, split, SPLITS, WINDOW, BLOCK_N)
        used = begin < end
        dims = tl.arange(0, HEAD_PAD)
        at = (index.to(tl.int64) * HEADS + head) * SPLITS + split
        tops = tl.load(stats + at * 2, mask=used, other=float("-inf"))
        totals = tl.load(stats + at * 2 + 1, mask=used, other=0.0)
        parts = tl.load(partial + at[:, None] * HEAD + dims[None, :], mask=used[:, None] & (dims < HEAD)[None, :], other=0.0)
        top = tl.max(tops, 0)
        fade = tl.exp2(tops - top)
        acc = tl.sum(parts * fade[:, None], 0)[None, :]
        total = tl.sum(totals * fade, 0)
        if SINKS:
            sink = tl.load(sinks + head)
            one = tl.zeros([1], tl.float32)
            acc, _, totals_one = with_sink(acc, one + top, one + total, one + sink)
            total = tl.sum(totals_one, 0)
        token = tl.load(query_start + row).to(tl.int64)
        place = out + token * stride_out_token + head * stride_out_head + dims[None, :]
        tl.store(place, (acc / total).to(out.dtype.element_ty), mask=(dims < HEAD)[None, :])
