"""What the store kernel writes, bit by bit, beside torch's conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.testing.reference_attention import to_stored
from pegboard_attn_triton import launch
from pegboard_attn_triton.layout import kv_cache_shape

BLOCK, HEADS, SIZE = 8, 3, 24


def stored(values: torch.Tensor, dtype: torch.dtype, **scales: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` [T, HEADS, SIZE] written as keys, their negatives as values; and both read back."""
    layer = AttentionLayer("layer", HEADS, HEADS, SIZE, 1.0, **scales)
    slots = torch.randperm(len(values) + 40)[: len(values)]
    cache = torch.zeros(kv_cache_shape(-(-(len(values) + 40) // BLOCK), BLOCK, HEADS, SIZE), dtype=dtype)
    launch.store(layer, values, -values, cache, slots).run()
    keys, negatives = cache[slots // BLOCK, :, :, slots % BLOCK].unbind(1)
    return keys, negatives


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def every_size(count: int) -> torch.Tensor:
    """Numbers of all magnitudes, all representable 8-bit numbers, and the midpoints between those."""
    representable = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
    ordered = representable.unique()
    middles = (ordered[1:] + ordered[:-1]) / 2
    around = torch.cat([middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    whole = torch.arange(-140, 141) / 2
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 448.0, 464.0, 465.0, 1e30, 2.0**-10, 2.0**-11, 1e-30])
    drawn = torch.randn(count) * 10.0 ** torch.empty(count).uniform_(-5, 4)
    return torch.cat([representable, around, whole, special, drawn])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rounding_is_to_the_nearest_and_even(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = every_size(3000)
    values = torch.cat([numbers, torch.zeros(-len(numbers) % (HEADS * SIZE))]).view(-1, HEADS, SIZE)
    keys, negatives = stored(values, dtype)
    assert torch.equal(bits(keys), bits(to_stored(values, None, dtype)))
    assert torch.equal(bits(negatives), bits(to_stored(-values, None, dtype)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float32, torch.float16])
@pytest.mark.parametrize("by_head", [False, True])
def test_scales_divide_exactly(dtype: torch.dtype, by_head: bool) -> None:
    torch.manual_seed(1)
    scale = torch.tensor([0.037, 1.3, 0.71]) if by_head else 0.037
    values = torch.randn(50, HEADS, SIZE)
    keys, negatives = stored(values, dtype, key_scale=scale, value_scale=2 * scale)
    assert torch.equal(bits(keys), bits(to_stored(values, scale, dtype)))
    assert torch.equal(bits(negatives), bits(to_stored(-values, 2 * scale, dtype)))


def test_not_a_number_stays_one() -> None:
    keys, _ = stored(torch.full((1, HEADS, SIZE), float("nan")), torch.float8_e4m3fn)
    assert keys.float().isnan().all()


def test_bits_are_kept_where_nothing_is_converted() -> None:
    values = torch.randint(-(2**15), 2**15, (9, HEADS, SIZE), dtype=torch.int16).view(torch.bfloat16)
    layer = AttentionLayer("layer", HEADS, HEADS, SIZE, 1.0)
    cache = torch.zeros(kv_cache_shape(3, BLOCK, HEADS, SIZE), dtype=torch.bfloat16)
    launch.store(layer, values, values, cache, torch.arange(9) + 5).run()
    written = cache.view(torch.int16)
    for token in range(9):
        block, offset = divmod(token + 5, BLOCK)
        assert torch.equal(written[block, 0, :, offset], values.view(torch.int16)[token])


def test_negative_slots_are_padding() -> None:
    layer = AttentionLayer("layer", HEADS, HEADS, SIZE, 1.0)
    cache = torch.full(kv_cache_shape(2, BLOCK, HEADS, SIZE), 7.0)
    values = torch.ones(3, HEADS, SIZE)
    launch.store(layer, values, values, cache, torch.tensor([-1, 4, -1])).run()
    assert int((cache == 1.0).sum()) == 2 * HEADS * SIZE
    assert (cache[0, :, :, 4] == 1.0).all()
