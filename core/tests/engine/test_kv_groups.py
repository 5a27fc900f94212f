"""Which layers share a block table, and how long a request can be with so many blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.engine.errors import EngineStartError
from pegboard.engine.kv_groups import MAX_WASTE, block_bytes, group_layers
from pegboard.wire import KVCacheSpec
from pegboard.wire.kv_cache import UNLIMITED, blocks_needed, tokens_that_fit, window_blocks

W = 8
BYTES = 2 * 4 * 1 * 8 * 4


def spec(window: int | None = None, **changes: Any) -> KVCacheSpec:
    fields = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float32", **changes}
    return KVCacheSpec(sliding_window=window, **fields)


def layers(*windows: int | None, first: int = 0) -> dict[str, KVCacheSpec]:
    return {f"layers.{i}": spec(window) for i, window in enumerate(windows, first)}


def sizes(*stages: dict[str, KVCacheSpec], longest: int = 1000) -> list[tuple[int | None, int]]:
    """Window and number of layers of each group."""
    return [(g.spec.sliding_window, len(g.layers)) for g in group_layers(stages, longest)]


def test_equal_layers_are_one_group() -> None:
    assert sizes(layers(*[None] * 5)) == [(None, 5)]
    assert sizes(layers(*[W] * 5)) == [(W, 5)]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([W, None] * 3, [(W, 3), (None, 3)]),
        ([W, W, W, W, W, None] * 3, [(W, 3)] * 5 + [(None, 3)]),
        (([W] * 5 + [None]) * 4 + [W, W], [(W, 4)] * 4 + [(W, 3)] * 2 + [(None, 4)]),
        ([W, W, W, None], [(W, 1)] * 3 + [(None, 1)]),
        ([W, 16, None] * 2, [(W, 2), (16, 2), (None, 2)]),
    ],
    ids=["Gemma 2", "Gemma 3 270M", "Gemma 3 1B", "three to one", "three kinds"],
)
def test_groups_are_as_large_as_little_waste_allows(windows: list[int | None], expected: list[tuple[int | None, int]]) -> None:
    assert sorted(sizes(layers(*windows)), key=str) == sorted(expected, key=str)


def test_a_window_as_long_as_any_request_is_none() -> None:
    assert sizes(layers(W, None), longest=W) == [(None, 2)]
    assert sizes(layers(W, None), longest=W + 1) == [(W, 1), (None, 1)]


def test_stages_agree_and_have_their_part_of_every_group() -> None:
    first, second = layers(*[W] * 5, None, W, W, W), layers(*[W] * 2, None, *[W] * 5, None, first=9)
    groups = group_layers([first, first, second, second], 1000)
    assert sum(len(group.layers) for group in groups) == 18
    for stage in (first, second):
        parts = [[name for name in group.layers if name in stage] for group in groups]
        assert sorted(name for part in parts for name in part) == sorted(stage)
        assert block_bytes(groups, stage) == BYTES * max(len(part) for part in parts)
        places = len(groups) * max(len(part) for part in parts)
        assert places - len(stage) <= 3
    assert block_bytes(groups, {}) == 0


@given(st.lists(st.sampled_from((None, W, 16)), min_size=1, max_size=40), st.integers(1, 4))
def test_every_layer_is_in_one_group_of_its_kind(windows: list[int | None], num_stages: int) -> None:
    every = layers(*windows)
    names = list(every)
    cuts = [len(names) * i // num_stages for i in range(num_stages + 1)]
    stages = [{name: every[name] for name in names[a:b]} for a, b in pairwise(cuts) if a < b]
    groups = group_layers(stages, 1000)
    assert sorted(name for group in groups for name in group.layers) == sorted(names)
    for group in groups:
        assert {every[name] for name in group.layers} == {group.spec}
    if len(stages) == 1:
        for window in set(windows):
            places = block_bytes(groups, every) * sum(group.spec.sliding_window == window for group in groups)
            assert BYTES * windows.count(window) >= (1 - MAX_WASTE) * places


def test_layers_of_different_bytes_are_refused_by_name() -> None:
    with pytest.raises(EngineStartError, match=r"256 bytes \(layer 'a' among others\), 512 bytes \(layer 'b' among others\)"):
        group_layers([{"a": spec(), "b": spec(num_kv_heads=2)}], 100)
    assert len(group_layers([{"a": spec(), "b": spec(num_kv_heads=2, head_size=4)}], 100)) == 2, "equal bytes, another shape"
    assert spec(num_vectors=1, head_size=16).block_bytes == spec().block_bytes


def test_ranks_that_share_a_layer_must_store_it_alike() -> None:
    with pytest.raises(EngineStartError, match=r"rank 1 stores .* for layer 'layers\.0'"):
        group_layers([layers(W), layers(None)], 100)
    with pytest.raises(EngineStartError, match="no worker has an attention layer"):
        group_layers([{}], 100)


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(1, 200),
    st.integers(1, 8),
    st.integers(1, 50),
)
def test_the_longest_request_needs_what_there_is(windows: list[int | None], blocks: int, size: int, chunk: int) -> None:
    tokens = tokens_that_fit(blocks, windows, size, chunk)
    if tokens == UNLIMITED:
        assert blocks_needed(10**6, windows, size, chunk) <= blocks
    else:
        assert blocks_needed(tokens, windows, size, chunk) <= blocks < blocks_needed(tokens + 1, windows, size, chunk)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 30), st.data())
def test_no_chunks_hold_more_than_is_counted(window: int, size: int, largest: int, data: Any) -> None:
    """Blocks of a request that gives up what is behind its window now and then: at the latest when another block is full."""
    bound, computed, released = window_blocks(window, size, largest), 0, 0
    for chunk in data.draw(st.lists(st.integers(1, largest), max_size=30)):
        assert -(-(computed + chunk) // size) - released <= bound
        before, computed = computed, computed + chunk
        if computed // size > before // size or data.draw(st.booleans()):
            released = max(0, computed - window + 1) // size
