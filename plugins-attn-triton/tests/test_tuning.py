"""Sizes of kernels: the shipped table, the file of measured ones, the search. No kernel runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from pegboard_attn_triton.tuning.cache import TuningCache
from pegboard_attn_triton.tuning.choice import choose_config
from pegboard_attn_triton.tuning.config import KernelConfig, Problem, fit, group_pad, head_pad, shared_bytes
from pegboard_attn_triton.tuning.search import candidates, tune
from pegboard_attn_triton.tuning.table import INTERPRETED, SHARED_MEMORY, TABLE, lookup, shared_memory

PROBLEM = Problem("decode", 128, 4, "bfloat16", "bfloat16", 16)


def test_tiles_are_powers_of_two_that_hold_what_they_must() -> None:
    assert [head_pad(size) for size in (8, 16, 64, 80, 96, 128, 192, 256)] == [16, 16, 64, 128, 128, 128, 256, 256]
    assert [group_pad(group) for group in (1, 3, 16, 17, 71)] == [16, 16, 16, 32, 128]


@pytest.mark.parametrize("capability", [*SHARED_MEMORY, (9, 2), (13, 0)])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("float16", "int8"), ("float32", "float32"), ("float32", "int8")])
def test_a_lookup_fits_every_device(capability: tuple[int, int], kernel: str, types: tuple[str, str]) -> None:
    for head_size in (16, 64, 80, 128, 192, 256):
        for group in (1, 8, 16):
            problem = Problem(kernel, head_size, group, *types, 16)
            config = lookup(problem, capability)
            assert shared_bytes(problem, config) <= shared_memory(capability)
            assert (config.block_m == 0) == (kernel == "decode")
            assert config.block_m == 0 or config.block_m >= group


def test_the_table_knows_what_it_is_asked() -> None:
    assert lookup(PROBLEM, (9, 0)) == TABLE[90, "decode", 128, 2]
    assert lookup(PROBLEM, (8, 0)) == TABLE[80, "decode", 128, 2]
    assert lookup(Problem("prefill", 96, 4, "float16", "int8", 16), (9, 0)) == TABLE[90, "prefill", 128, 1]
    assert lookup(Problem("prefill", 64, 4, "float32", "int8", 16), (9, 0)) == TABLE[90, "prefill", 64, 4]


def test_an_unknown_device_is_taken_for_the_one_before_it() -> None:
    assert shared_memory((9, 0)) == shared_memory((9, 5)) == 232_448
    assert shared_memory((12, 1)) == 101_376
    assert shared_memory((7, 5)) == shared_memory((8, 6))


def test_fitting_takes_stages_first_then_keys_then_queries() -> None:
    large = KernelConfig(128, 128, 8, 4)
    problem = Problem("prefill", 256, 4, "bfloat16", "bfloat16", 16)
    assert fit(problem, large, 10**9) == large
    assert fit(problem, large, 300_000).num_stages < 4
    small = fit(problem, large, 50_000)
    assert (small.num_stages, small.block_n) == (1, 16)
    assert small.block_m < 128
    with pytest.raises(ValueError, match="bytes of shared memory, and there are 1000"):
        fit(problem, large, 1000)


def test_interpreted_sizes_hold_a_group() -> None:
    config = choose_config(Problem("prefill", 64, 300, "float32", "float32", 16), torch.device("cpu"))
    assert config.block_m == 300
    assert choose_config(PROBLEM, torch.device("cpu")).block_n == INTERPRETED["decode"].block_n


# The file


def test_what_is_put_is_got_and_lies_by_device_and_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = TuningCache.of_device("NVIDIA H100 80GB HBM3 / x")
    assert cache.path.parent == tmp_path / "pegboard" / "attn-triton"
    assert cache.path.name.startswith("NVIDIA_H100_80GB_HBM3_x_triton_")
    assert cache.get(PROBLEM) is None
    other = Problem("prefill", 128, 4, "bfloat16", "bfloat16", 16)
    cache.put(PROBLEM, KernelConfig(0, 32, 4, 3))
    cache.put(other, KernelConfig(64, 32, 4, 3))
    cache.put(PROBLEM, KernelConfig(0, 64, 8, 5))
    again = TuningCache.of_device("NVIDIA H100 80GB HBM3 / x")
    assert again.get(PROBLEM) == KernelConfig(0, 64, 8, 5)
    assert again.get(other) == KernelConfig(64, 32, 4, 3)
    assert again.get(Problem("decode", 128, 4, "bfloat16", "int8", 16)) is None
    assert TuningCache.of_device("NVIDIA A100").get(PROBLEM) is None
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name], "nothing temporary is left"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1, 2]",
        '{"a": 3}',
        '{"a": {"block_n": 64}}',
        json.dumps({"a": {"block_m": 0, "block_n": 48, "num_warps": 4, "num_stages": 3}}),
        json.dumps({"a": {"block_m": 0, "block_n": 64, "num_warps": "4", "num_stages": 3}}),
        json.dumps({"a": {"block_m": 0, "block_n": 64, "num_warps": 4, "num_stages": 0}}),
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_file_is_left_out_of_account(tmp_path: Path, text: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    cache = TuningCache(tmp_path / "sizes.json")
    cache.path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING):
        assert cache.get(PROBLEM) is None
    assert str(cache.path) in caplog.text
    cache.put(PROBLEM, KernelConfig(0, 64, 4, 3))
    assert cache.get(PROBLEM) == KernelConfig(0, 64, 4, 3)


def test_a_put_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TuningCache(tmp_path / "sizes.json")
    cache.put(PROBLEM, KernelConfig(0, 64, 4, 3))
    before = cache.path.read_text()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        cache.put(PROBLEM, KernelConfig(0, 32, 4, 3))
    assert cache.path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


# The search


def test_the_quickest_that_works_is_taken() -> None:
    configs = [KernelConfig(0, 16, 4, 1), KernelConfig(0, 32, 4, 1), KernelConfig(0, 64, 4, 1)]

    def measure(config: KernelConfig) -> float:
        if config.block_n == 64:
            raise RuntimeError("out of resource: registers")
        return 1.0 / config.block_n

    assert tune(PROBLEM, configs, measure) == configs[1]
    with pytest.raises(RuntimeError, match="no sizes work"):
        tune(PROBLEM, configs[2:], measure)


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_candidates_fit_and_hold_the_shipped_sizes(kernel: str) -> None:
    problem = Problem(kernel, 128, 4, "bfloat16", "bfloat16", 16)
    found = candidates(problem, shared_memory((9, 0)))
    assert lookup(problem, (9, 0)) in found
    assert all(shared_bytes(problem, config) <= shared_memory((9, 0)) for config in found)
    assert len(set(found)) == len(found)
