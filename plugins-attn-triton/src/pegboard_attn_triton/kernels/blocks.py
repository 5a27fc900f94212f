"""Copy whole blocks, within a cache or between one on the device and one in pinned memory of the host."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(source, target, pairs, words, stride_source, stride_target, CHUNK: tl.constexpr):
    """Program (i, chunk): ``CHUNK`` of the ``words`` of one block, from block ``pairs[2 * i]`` to block ``pairs[2 * i + 1]``."""
    pair = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < words
    from_block = tl.load(pairs + 2 * pair)
    to_block = tl.load(pairs + 2 * pair + 1)
    moved = tl.load(source + from_block * stride_source + at, mask=inside)
    tl.store(target + to_block * stride_target + at, moved, mask=inside)
