"""Write a step's keys and values into the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from pegboard_attn_triton.kernels.common import key_scale_of


@triton.jit
def rounded(values):
    """To the nearest whole number, ties to even; below 2**22. Adding 1.5 * 2**23 leaves float32 no bits behind the point."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def float8_bits(values):
    """float32 as the bits of float8_e4m3fn, to nearest, ties to even, cut off at the largest number. Spelled out, because devices
    before compute capability 8.9 do not convert, and the interpreter rounds wrongly."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # from 2**-6 on: three bits of the mantissa stay; the exponent's offset falls from 127 to 7
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = rounded(tl.minimum(tl.abs(values), 1.0) * 512.0).to(tl.int32)
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_stored(values, scale, KIND: tl.constexpr, SCALES: tl.constexpr):
    """``values`` as the cache holds them. ``KIND``: "plain", "int8" or "float8" (as bytes). ``scale`` counts unless ``SCALES`` is
    "none"."""
    if SCALES != "none" or KIND != "plain":
        values = values.to(tl.float32)
    if SCALES != "none":
        values = tl.math.div_rn(values, tl.zeros_like(values) + scale)
    if KIND == "int8":
        values = rounded(tl.clamp(values, -127.0, 127.0)).to(tl.int8)
    if KIND == "float8":
        values = float8_bits(values)
    return values


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def store_kernel(
    key,
    value,
    cache,
    slots,
    key_scale,
    value_scale,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    num_rows,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
):
    """``ROWS`` of the ``num_rows`` pairs of token and head per program. A token whose slot is negative is padding, not stored."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // KV_HEADS).to(tl.int64)
    head = row % KV_HEADS
    slot = tl.load(slots + token, mask=row < num_rows, other=-1)
    dims = tl.arange(0, HEAD_PAD)[None, :]
    inside = (slot >= 0)[:, None] & (dims < HEAD)
    keys = tl.load(key + (token * stride_key_token + head * stride_key_head)[:, None] + dims, mask=inside)
    values = tl.load(value + (token * stride_value_token + head * stride_value_head)[:, None] + dims, mask=inside)
    slot = tl.maximum(slot, 0)
    place = (slot // BLOCK_SIZE) * stride_block + head * (BLOCK_SIZE * HEAD) + (slot % BLOCK_SIZE) * HEAD
    place = cache + place[:, None] + dims
    keys = to_stored(keys, key_scale_of(key_scale, head[:, None], KEY_SCALES), KIND, KEY_SCALES)
    values = to_stored(values, key_scale_of(value_scale, head[:, None], VALUE_SCALES), KIND, VALUE_SCALES)
    tl.store(place, keys.to(cache.dtype.element_ty), mask=inside)
    tl.store(place + KV_HEADS * BLOCK_SIZE * HEAD, values.to(cache.dtype.element_ty), mask=inside)
