"""The parts of ``scripts/gpu_check.py`` that need no GPU, so that the script does not fail for another reason than the GPU's."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("gpu_checks.attention_kernels")


@pytest.mark.parametrize("features", ["plain", "alibi, sinks", "scales by head"])
def test_mixed_steps(kernels: ModuleType, features: str) -> None:
    types = ("float16", "int8") if features == "scales by head" else ("float32", "float32")
    assert 0 < kernels.mixed_steps(CPU, "9/3x64", types, kernels.FEATURES[features]) < 4e-3


def test_stored_bits_and_moved_blocks(kernels: ModuleType) -> None:
    assert kernels.stored_bits(CPU) == kernels.moved_blocks(CPU) == 0.0


def test_a_wrong_kernel_fails(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.TritonAttentionBackend, "attend", lambda self, *arguments: arguments[-1].zero_())
    check = kernels._guarded("name", lambda: kernels.mixed_steps(CPU, "9/3x64", ("float32", "float32"), {}))
    assert not check.passed
    assert str(check).startswith("FAIL")


def test_an_error_without_words_is_a_failure_as_well(kernels: ModuleType) -> None:
    def wordless() -> float:
        raise AssertionError

    assert str(kernels._guarded("name", wordless)).rstrip().endswith("AssertionError:")


def test_prefill_and_decode_are_timed(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from pegboard_attn_triton.tuning.search import Load

    bandwidth = importlib.import_module("gpu_checks.attention_bandwidth")
    monkeypatch.setattr(bandwidth, "SHAPES", {"2/1x16": (2, 16, 1)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    decode = bandwidth._decode("2/1x16", ("float32", "float32"), Load(2, 40), 1e9, CPU)
    assert decode.figures["bytes"] == 2 * 2 * 40 * 16 * 4
    assert bandwidth._prefill("2/1x16", Load(1, 40, 8), CPU).passed


def test_every_section_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    for name in importlib.import_module("gpu_check").SECTIONS:
        assert callable(importlib.import_module(f"gpu_checks.{name}").run)
