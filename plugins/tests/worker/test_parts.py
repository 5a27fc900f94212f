"""Threads, memory, precision, cache tensors and bitmasks."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from pegboard.config import KVCacheSettings, SchedulerConfig
from pegboard.contracts.attention import AttentionLayer
from pegboard.testing.reference_attention import ReferenceAttentionBackend
from pegboard.wire import GrammarOutput, KVCacheConfig, KVCacheGroup, KVCacheSpec, SchedulerOutput
from pegboard.wire.kv_cache import window_blocks
from pegboard_plugins.worker import dummy_step, memory, threads
from pegboard_plugins.worker.bitmasks import masks_by_row
from pegboard_plugins.worker.cache_engine import CacheEngine
from pegboard_plugins.worker.dtypes import resolve_dtype
from pegboard_plugins.worker.platforms import CpuPlatform, CudaPlatform, multiplies_bfloat16

SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
MIB = 1 << 20


def test_threads_are_stated_or_the_cores_shared_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert threads.threads_per_worker(5, 2) == 5
    assert threads.threads_per_worker(None, 1) == 8
    assert threads.threads_per_worker(None, 3) == 2
    assert threads.threads_per_worker(None, 9) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.threads_per_worker(None, 1) == 3


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("nonsense", None)]
)
def test_container_quotas(tmp_path: Path, text: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert threads._quota(file) == cores
    assert threads._quota(tmp_path / "missing") is None


def test_resident_memory_follows_what_is_touched() -> None:
    memory.reset_peak()
    before = memory.resident()
    block = np.ones(64 * MIB, np.uint8)
    assert memory.resident() - before > 50 * MIB
    del block
    memory.trim_heap()
    assert memory.peak_resident() - before > 50 * MIB
    assert memory.resident() - before < 40 * MIB


def test_host_memory_knows_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = memory.host_memory()
    assert 0 < free <= total
    (tmp_path / "memory.max").write_text(str(300 * MIB))
    (tmp_path / "memory.current").write_text(str(200 * MIB))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\n")
    monkeypatch.setattr(memory, "_CGROUP_V2", tmp_path)
    assert memory.host_memory() == (min(free, 150 * MIB), 300 * MIB)


def test_kv_budget_says_where_it_comes_from() -> None:
    specs = {"a": SPEC, "b": SPEC}
    per_block = 2 * SPEC.block_bytes

    def budget(free: int = 1 << 40, seqs: int = 4, length: int = 160, booked: int = 0, **settings: object) -> tuple[int, str]:
        limits = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=32)
        return memory.kv_budget(KVCacheSettings(**settings), specs, free, limits, length, booked)  # type: ignore[arg-type]

    assert budget() == (41 * per_block, "all that 4 requests of 160 tokens can fill")
    assert budget(memory="3MiB") == (3 * MIB, f"kv_cache.memory={3 * MIB}")
    assert budget(seqs=10**6)[0] == memory.DEFAULT_CPU_BUDGET
    assert budget(seqs=10**6, length=10**8)[0] == (10**8 // 16 + 1) * per_block, "one request of full length fits"
    assert budget(free=1000, booked=100, memory_fraction=0.5)[0] == 400
    assert "less 100 booked" in budget(free=1000, booked=100)[1]
    specs["b"] = replace(SPEC, sliding_window=17)
    places = 10 + window_blocks(17, SPEC.block_size, 32)
    assert budget()[0] == (4 * places + 1) * SPEC.block_bytes, "a request keeps less of layers with a window"


def test_dtypes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cpu = CpuPlatform()
    assert resolve_dtype("auto", "float32", cpu) == "float32"
    assert resolve_dtype("auto", "bfloat16", cpu) == "bfloat16"
    assert resolve_dtype("auto", None, cpu) == ("bfloat16" if multiplies_bfloat16() else "float32")
    assert caplog.records == []
    for configured, stated, chosen, level in [
        ("auto", "float16", "float32", "INFO"),
        ("float32", "bfloat16", "float32", "INFO"),
        ("bfloat16", "float32", "bfloat16", "WARNING"),
        ("float16", "bfloat16", "float16", "WARNING"),
        ("bfloat16", "float16", "bfloat16", "WARNING"),
    ]:
        caplog.clear()
        assert resolve_dtype(configured, stated, cpu) == chosen
        (record,) = caplog.records
        assert record.levelname == level
        assert stated in record.getMessage()


def test_platforms_answer_without_a_device() -> None:
    assert CpuPlatform.is_available()
    assert CudaPlatform.is_available() == torch.cuda.is_available()
    used, total = CpuPlatform().memory()
    assert 0 < used < total
    assert CpuPlatform().set_device(0, None) == torch.device("cpu")
    assert CpuPlatform().device_count() >= 1


def make_cache(dtype: torch.dtype = torch.float32, host_blocks: int = 3) -> CacheEngine:
    layers = [AttentionLayer(name, num_heads=2, num_kv_heads=2, head_size=8, scale=1.0) for name in ("a", "b")]
    config = KVCacheConfig(num_blocks=6, groups=[KVCacheGroup(layers=["a", "b"], spec=SPEC)], num_host_blocks=host_blocks)
    return CacheEngine(config, layers, dict.fromkeys("ab", ReferenceAttentionBackend), dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_tensors_start_as_zeros_and_are_writable(dtype: torch.dtype) -> None:
    cache = make_cache(dtype)
    for tensor in [*cache.device_caches.values(), *cache.host_caches.values()]:
        assert tensor.dtype == dtype
        assert not tensor.any()
        tensor.fill_(1)
    cache.release()
    assert not cache.device_caches
    cache.allocate()
    assert not cache.device_caches["a"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_block_moves_happen_in_order_and_at_once(dtype: torch.dtype) -> None:
    cache = make_cache(dtype)
    for offset, name in enumerate("ab"):
        for block in range(6):
            cache.device_caches[name][block].fill_(2 * block + offset)
    cache.apply(SchedulerOutput(step_id=1, swap_out=[(1, 2), (2, 1)], swap_in=[(2, 4)], block_copies=[(4, 5), (3, 4)]))
    for offset, name in enumerate("ab"):
        assert [float(block.flatten()[0]) for block in cache.host_caches[name]] == [0, 4 + offset, 2 + offset]
        assert [float(block.flatten()[0]) for block in cache.device_caches[name]] == [
            offset, 2 + offset, 4 + offset, 6 + offset, 6 + offset, 2 + offset,
        ]  # fmt: skip


def cache_of_groups(heads_of_c: int = 2, head_size_of_c: int = 8) -> CacheEngine:
    """Groups (a, b) and (c)."""
    layers = [AttentionLayer(name, num_heads=2, num_kv_heads=2, head_size=8, scale=1.0) for name in "ab"]
    layers.append(AttentionLayer("c", num_heads=4, num_kv_heads=heads_of_c, head_size=head_size_of_c, scale=1.0))
    groups = [KVCacheGroup(layers=["a", "b"], spec=SPEC), KVCacheGroup(layers=["c"], spec=replace(SPEC, sliding_window=4))]
    config = KVCacheConfig(num_blocks=6, groups=groups, num_host_blocks=2)
    return CacheEngine(config, layers, dict.fromkeys("abc", ReferenceAttentionBackend), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("heads", "size"), [(2, 8), (4, 4)])
def test_groups_share_memory_and_a_block_moves_whatever_group_has_it(heads: int, size: int) -> None:
    cache = cache_of_groups(heads, size)
    a, b, c = (cache.device_caches[name] for name in "abc")
    assert a.data_ptr() == c.data_ptr() != b.data_ptr()
    assert a.nbytes == c.nbytes == 6 * SPEC.block_bytes
    a[1], b[1], c[2] = 10, 11, 20
    assert bool((a[2] == 20).all()), "the same block, seen by the other group"
    cache.apply(SchedulerOutput(step_id=1, swap_out=[(1, 1)], block_copies=[(1, 3), (2, 4)]))
    assert [float(tensor[3].flatten()[0]) for tensor in (a, b)] == [10, 11]
    assert bool((c[4] == 20).all())
    assert float(cache.host_caches["b"][1].flatten()[0]) == 11


def test_groups_whose_blocks_differ_cannot_share() -> None:
    with pytest.raises(ValueError, match=r"different numbers of cache entries: \{'a': 3072, 'c': 6144\}"):
        cache_of_groups(4, 8)


def test_cache_memory_is_committed_when_it_is_written() -> None:
    layers = [AttentionLayer("a", num_heads=8, num_kv_heads=8, head_size=128, scale=1.0)]
    spec = KVCacheSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="float32")
    before = memory.resident()
    config = KVCacheConfig(num_blocks=1000, groups=[KVCacheGroup(layers=["a"], spec=spec)])
    cache = CacheEngine(config, layers, {"a": ReferenceAttentionBackend}, torch.float32, torch.device("cpu"))
    assert cache.device_caches["a"].nbytes > 120 * MIB
    assert memory.resident() - before < 10 * MIB


@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "lengths"),
    [(10, 3, 99, [4, 3, 3]), (2, 8, 99, [1, 1]), (100, 2, 20, [20, 20]), (7, 1, 99, [7])],
)
def test_dummy_tokens_are_spread_with_the_remainder_first(tokens: int, rows: int, longest: int, lengths: list[int]) -> None:
    assert dummy_step.spread(tokens, rows, longest).tolist() == lengths


def grammar_output(slots: list[int], allowed: list[list[int]], vocab: int = 40, step_id: int = 1) -> GrammarOutput:
    bits = np.zeros((len(slots), -(-vocab // 32) * 32), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, ids] = 1
    return GrammarOutput(step_id=step_id, slots=slots, bitmask=np.packbits(bits, bitorder="little").tobytes())


def allowed_by(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_bitmasks_come_to_the_rows_that_sample() -> None:
    plan = SchedulerOutput(step_id=1, slots=[7, 5, 3], grammar_slots=[3, 5])
    masks = masks_by_row(plan, np.array([7, 3]), grammar_output([3, 99], [[0, 33, 39], [5]]), 40)
    assert {row: allowed_by(mask) for row, mask in masks.items()} == {1: [0, 33, 39]}, "slot 7 has no grammar, slot 5 a chunk"


def test_a_bitmask_that_ends_early_forbids_what_is_behind() -> None:
    plan = SchedulerOutput(step_id=1, slots=[3], grammar_slots=[3])
    mask = masks_by_row(plan, np.array([3]), grammar_output([3], [[0, 31]], vocab=32), 100)[0]
    assert len(mask) == 4
    assert allowed_by(mask) == [0, 31]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (None, r"slots \[3\] need a grammar's mask to sample, but none was given"),
        (grammar_output([7], [[1]]), r"slots \[3\] need a grammar's mask to sample, but there are masks for slots \[7\] only"),
        (grammar_output([], []), r"slots \[3\] need"),
        (grammar_output([3], [[1]], step_id=2), "bitmasks of step 2, but step 1 is open"),
        (GrammarOutput(step_id=1, slots=[3, 7], bitmask=b"1234"), "4 bytes of bitmasks are not 2 rows"),
        (GrammarOutput(step_id=1, slots=[3], bitmask=b""), "0 bytes"),
    ],
)
def test_a_row_with_a_grammar_never_samples_without_its_mask(grammar: GrammarOutput | None, message: str) -> None:
    plan = SchedulerOutput(step_id=1, slots=[7, 3], grammar_slots=[3])
    with pytest.raises(ValueError, match=message):
        masks_by_row(plan, np.array([7, 3]), grammar, 40)


def test_a_grammar_of_a_slot_outside_the_plan_is_refused() -> None:
    plan = SchedulerOutput(step_id=1, slots=[3], grammar_slots=[4])
    with pytest.raises(ValueError, match=r"slots \[4\] are said to have a grammar, but are not in the plan"):
        masks_by_row(plan, np.array([3]), grammar_output([4], [[1]]), 40)
