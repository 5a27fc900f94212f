"""From memory reports to a number of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.config import EngineConfig, KVCacheSettings
from pegboard.contracts.model import ModelSpec
from pegboard.engine.errors import EngineStartError
from pegboard.engine.info import EngineInfo
from pegboard.engine.kv_sizing import kv_cache_config
from pegboard.wire import KVCacheSpec, MemoryReport


def spec(**changes: Any) -> KVCacheSpec:
    return KVCacheSpec(**{"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float32", **changes})


def report(available: int) -> MemoryReport:
    return MemoryReport(weights=1, activations=2, resident=3, available=available, reason="90 % of 10 bytes")


def test_the_rank_with_least_room_decides() -> None:
    layers = {"a": spec(), "b": spec()}
    config = kv_cache_config(KVCacheSettings(), [layers, layers], [report(512 * 10), report(512 * 7 + 511)])
    assert config.num_blocks == 7
    assert config.groups[0].layers == ["a", "b"]
    assert config.tokens_per_request(8) == 6 * 4


def test_ranks_with_different_layers() -> None:
    config = kv_cache_config(KVCacheSettings(), [{"a": spec()}, {"b": spec(), "c": spec()}], [report(2560), report(2560)])
    assert (config.num_blocks, config.groups[0].layers) == (5, ["a", "b", "c"])


def test_an_exact_number_of_blocks_counts_usable_ones() -> None:
    config = kv_cache_config(KVCacheSettings(num_blocks=20), [{"a": spec()}], [report(0)])
    assert (config.num_blocks, config.tokens_per_request(8)) == (21, 80)


def test_host_blocks_come_from_swap_space() -> None:
    config = kv_cache_config(KVCacheSettings(swap_space=1000, num_blocks=1), [{"a": spec()}], [report(0)])
    assert config.num_host_blocks == 3


def test_layers_that_store_differently_make_groups() -> None:
    layers = {"a": spec(), "b": spec(sliding_window=8), "c": spec(), "d": spec(sliding_window=8)}
    config = kv_cache_config(KVCacheSettings(), [layers], [report(512 * 10)])
    assert [(g.layers, g.spec.sliding_window) for g in config.groups] == [(["a", "c"], None), (["b", "d"], 8)]
    assert config.num_blocks == 10, "each block has room for two layers"


def test_no_room_names_numbers_and_options() -> None:
    with pytest.raises(EngineStartError, match=r"rank 1 has 511 bytes .*\(90 % of 10 bytes\).*256 bytes.*kv_cache.memory"):
        kv_cache_config(KVCacheSettings(), [{"a": spec()}] * 2, [report(10**6), report(511)])


def test_ranks_that_disagree() -> None:
    with pytest.raises(EngineStartError, match="layer 'a'"):
        kv_cache_config(KVCacheSettings(num_blocks=1), [{"a": spec()}, {"a": spec(dtype="bfloat16")}], [report(0)] * 2)


def test_a_cache_shorter_than_the_context_warns(caplog: Any) -> None:
    model = ModelSpec("M", 10, 8, 1, 1, 1, 8, max_model_len=100)
    kv = kv_cache_config(KVCacheSettings(num_blocks=20), [{"a": spec()}], [report(0)])
    assert EngineInfo.of(EngineConfig(model="m"), model, kv).max_tokens == 81
    assert "holds 80 tokens of one request (20 blocks of 4), less than max_model_len=100" in caplog.text
    caplog.clear()
    assert EngineInfo.of(EngineConfig(model="m", max_model_len=81), model, kv).max_tokens == 81
    assert not caplog.records


def test_a_model_without_attention_is_told_as_such() -> None:
    with pytest.raises(EngineStartError, match="no worker has an attention layer"):
        kv_cache_config(KVCacheSettings(), [{}], [report(10**6)])
