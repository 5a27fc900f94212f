"""What the attention kernels share: one step of the online softmax over a tile of cached keys.

Constexpr names in capitals. ``BLOCK_SIZE``: tokens of a cache block; ``HEAD``/``HEAD_PAD``: head size, and the power of two that
holds it; ``BLOCK_N``: keys per tile. Scores are in units of log 2, so that weights are ``exp2`` of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_scale_of(key_scale, head, SCALES: tl.constexpr):
    """What stored keys or values of one head are multiplied with. ``SCALES``: "none", "tensor" (a number), "head" (a pointer)."""
    if SCALES == "head":
        return tl.load(key_scale + head)
    elif SCALES == "tensor":
        return key_scale
    else:
        return 1.0


@triton.jit
def load_cached(pointers, live, dims, BOUNDED: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr):
    """A tile of keys or values; 0 where ``live`` is not set (with ``BOUNDED``) and behind the head's end."""
    if HEAD == HEAD_PAD:
        if BOUNDED:
            return tl.load(pointers, mask=live, other=0.0)
        else:
            return tl.load(pointers)
    elif BOUNDED:
        return tl.load(pointers, mask=live & (dims < HEAD), other=0.0)
    else:
        return tl.load(pointers, mask=dims < HEAD, other=0.0)


@triton.jit
def attend_tile(
    query,
    acc,
    top,
    total,
    cache,
    table,
    stride_block,
    head,
    start,
    high,
    position,
    scale,
    soft_cap,
    slope,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Keys ``start … start + BLOCK_N - 1`` of one row for the queries [M, HEAD_PAD], which are of one key head.

    ``acc`` [M, HEAD_PAD], ``top`` and ``total`` [M]: weighted values, largest score and sum of weights so far; returned anew.
    ``position`` [M]: of the queries in the row. ``BOUNDED``: keys from ``high`` on are not read; ``CAUSAL``: queries see no later
    keys; ``WINDOW``: nor earlier ones than that many, if not 0. ``query`` is of the type in which products are computed.
    """
    at = start + tl.arange(0, BLOCK_N)
    live = at < high
    if BOUNDED:
        block = tl.load(table + at // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    else:
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
    place = block * stride_block + head * (BLOCK_SIZE * HEAD) + (at % BLOCK_SIZE) * HEAD
    dims = tl.arange(0, HEAD_PAD)

    keys = load_cached(cache + place[None, :] + dims[:, None], live[None, :], dims[:, None], BOUNDED, HEAD, HEAD_PAD)
    scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee") * scale
    if SOFT_CAP:
        # tanh by the logistic function: exact at both ends, and the interpreter has no tanh
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
    if ALIBI:
        scores += slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
    scores *= LOG2E
    if BOUNDED:
        scores = tl.where(live[None, :], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
    if WINDOW:
        scores = tl.where(at[None, :] > position[:, None] - WINDOW, scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1))
    if WINDOW:
        # a query whose window begins behind this tile has seen nothing yet: infinity minus infinity is no number
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        shift = new_top
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)

    values_at = cache + KV_HEADS * BLOCK_SIZE * HEAD + place[:, None] + dims[None, :]
    values = load_cached(values_at, live[:, None], dims[None, :], BOUNDED, HEAD, HEAD_PAD)
    acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc * fade[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def with_sink(acc, top, total, sink):
    """Take in a key without a value, whose score is ``sink`` [M]."""
    sink = sink * LOG2E
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return acc * fade[:, None], new_top, total * fade + tl.exp2(sink - new_top)
