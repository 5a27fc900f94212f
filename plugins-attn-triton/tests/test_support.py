"""What backends refuse and why, on devices that are told to them. Nothing is opened."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pegboard.contracts.attention import AttentionBackend, AttentionQuery
from pegboard.plugins import PluginHost
from pegboard_attn_triton import device, support
from pegboard_attn_triton.adapters import flash_attention
from pegboard_attn_triton.adapters.flash_attention import FlashAttention2Backend, FlashAttention3Backend
from pegboard_attn_triton.adapters.flashinfer import FlashInferBackend
from pegboard_attn_triton.backend import TritonAttentionBackend

QUERY = AttentionQuery("cuda", "bfloat16", "bfloat16", 32, 8, 128, 16)
ALL = [TritonAttentionBackend, FlashAttention2Backend, FlashAttention3Backend, FlashInferBackend]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a Hopper and every library."""
    monkeypatch.setattr(device, "capability", lambda: (9, 0))
    monkeypatch.setattr(device, "driver_problem", lambda: None)
    monkeypatch.setattr(device, "triton_problem", lambda: None)
    monkeypatch.setattr(support, "library_problem", lambda *_: None)
    monkeypatch.setattr(flash_attention, "find_spec", lambda _: True)
    return monkeypatch


def reasons(backend: type[AttentionBackend], **changes: object) -> str:
    answer = backend.supports(replace(QUERY, **changes))  # type: ignore[arg-type]
    assert answer.ok == (not answer.reasons)
    return "; ".join(answer.reasons)


@pytest.mark.usefixtures("hopper")
def test_what_fits_is_taken() -> None:
    assert reasons(TritonAttentionBackend, alibi=True, sinks=True, sliding_window=9, logits_soft_cap=5.0) == ""
    assert reasons(TritonAttentionBackend, kv_dtype="int8", kv_scales="head") == ""
    assert reasons(TritonAttentionBackend, kv_dtype="float8_e4m3fn", dtype="float32", head_size=80, block_size=24) == ""
    assert reasons(FlashAttention2Backend, block_size=256, alibi=True, logits_soft_cap=5.0) == ""
    assert reasons(FlashAttention3Backend, sliding_window=128) == ""
    assert reasons(FlashInferBackend, kv_dtype="float8_e4m3fn", kv_scales="tensor") == ""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("backend", "changes", "expected"),
    [
        (
            TritonAttentionBackend,
            {"dtype": "float64", "kv_dtype": "float64"},
            "dtype 'float64' is none of float32, bfloat16, float16",
        ),
        (TritonAttentionBackend, {"kv_dtype": "float16"}, "cache dtype 'float16' is none of bfloat16, int8, float8_e4m3fn"),
        (TritonAttentionBackend, {"head_size": 512}, "head size 512 is not in 1 … 256"),
        (TritonAttentionBackend, {"head_size": 100}, "head size 100 is not a multiple of 8"),
        (TritonAttentionBackend, {"num_heads": 7}, "7 heads do not divide into 8 key heads"),
        (TritonAttentionBackend, {"num_heads": 200, "num_kv_heads": 1}, "200 heads per key head are more than 128"),
        (TritonAttentionBackend, {"block_size": 0}, "block size 0 is not positive"),
        (TritonAttentionBackend, {"device": "xpu"}, "device 'xpu' is none of cuda, cpu"),
        (FlashAttention2Backend, {}, "block size 16 is no multiple of 256 (set kv_cache.block_size)"),
        (FlashAttention2Backend, {"sinks": True}, "attention sinks are not supported"),
        (FlashAttention2Backend, {"kv_dtype": "int8"}, "cache dtype 'int8' differs from dtype 'bfloat16'"),
        (FlashAttention3Backend, {"alibi": True}, "ALiBi is not supported"),
        (FlashInferBackend, {"alibi": True}, "ALiBi slopes of the model's own are not supported"),
        (FlashInferBackend, {"head_size": 80}, "head size 80 is none of 64, 128, 256"),
        (FlashInferBackend, {"kv_scales": "head"}, "scales per head are not supported"),
        (FlashInferBackend, {"kv_scales": "tensor"}, "scales are only supported of a float8 cache"),
    ],
)
def test_refusals_name_the_value(backend: type[AttentionBackend], changes: dict[str, object], expected: str) -> None:
    assert expected in reasons(backend, **changes)


def test_several_reasons_are_all_told(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(device, "capability", lambda: (7, 5))
    hopper.setattr(device, "triton_problem", lambda: "triton is not installed (pip install triton)")
    hopper.setattr(device, "driver_problem", lambda: "NVIDIA's driver is not installed")
    told = TritonAttentionBackend.supports(replace(QUERY, head_size=300, dtype="float64"))
    assert len(told.reasons) == 7
    assert {"compute capability 7.5 is below 8.0", "triton is not installed (pip install triton)"} <= set(told.reasons)


def test_old_devices_keep_no_float8_and_only_hoppers_run_version_3(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(device, "capability", lambda: (8, 0))
    assert reasons(TritonAttentionBackend) == ""
    wanted = "a float8_e4m3fn cache needs compute capability 8.9, and the device has 8.0"
    assert wanted in reasons(TritonAttentionBackend, kv_dtype="float8_e4m3fn")
    assert "compute capability 8.0 is not that of a Hopper" in reasons(FlashAttention3Backend)


def test_tiles_that_fit_no_shared_memory_are_refused(hopper: pytest.MonkeyPatch) -> None:
    wide = {"num_heads": 71, "num_kv_heads": 1, "head_size": 256, "dtype": "float32", "kv_dtype": "float32"}
    assert reasons(TritonAttentionBackend, **wide) == ""
    hopper.setattr(device, "capability", lambda: (8, 6))
    assert "bytes of shared memory, and there are 101376" in reasons(TritonAttentionBackend, **wide)
    assert reasons(TritonAttentionBackend, **{**wide, "dtype": "bfloat16", "kv_dtype": "bfloat16", "head_size": 128}) == ""


def test_no_device(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(device, "capability", lambda: None)
    assert reasons(TritonAttentionBackend) == "no CUDA device is visible"


@pytest.mark.parametrize("backend", ALL)
def test_processors_only_interpret(backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "on a processor the kernels only run interpreted" in reasons(backend, device="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "only run interpreted" not in reasons(backend, device="cpu")


@pytest.mark.parametrize("backend", ALL)
def test_asking_opens_no_device(backend: type[AttentionBackend]) -> None:
    assert not backend.supports(QUERY).ok or torch.cuda.is_available()
    assert not torch.cuda.is_initialized()


def test_missing_libraries_are_named() -> None:
    assert "flash-attn is not installed (pip install flash-attn)" in reasons(FlashAttention2Backend)
    assert "flash_attn_interface is not installed" in reasons(FlashAttention3Backend)
    assert "flashinfer-python is not installed (pip install flashinfer-python)" in reasons(FlashInferBackend)


def test_without_triton_the_reason_is_told_and_nothing_breaks() -> None:
    code = """
import sys
sys.modules["triton"] = None
from importlib.metadata import PackageNotFoundError
from pegboard.contracts.attention import AttentionQuery
from pegboard_attn_triton import device
from pegboard_attn_triton.adapters.flash_attention import FlashAttention2Backend, FlashAttention3Backend
from pegboard_attn_triton.adapters.flashinfer import FlashInferBackend
from pegboard_attn_triton.backend import TritonAttentionBackend

def missing(name):
    raise PackageNotFoundError(name)

device.version = missing
for backend in (TritonAttentionBackend, FlashAttention2Backend, FlashAttention3Backend, FlashInferBackend):
    reasons = backend.supports(AttentionQuery("cuda", "bfloat16", "bfloat16", 8, 8, 64, 16)).reasons
    assert "triton is not installed (pip install triton)" in reasons, reasons
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("installed", "problem"), [("2.7.4.post1", None), ("2.5.9", "flash-attn 2.5.9 is older than 2.6")])
def test_versions(installed: str, problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "version", lambda _: installed)
    assert support.library_problem("flash-attn", (2, 6), "pip install flash-attn") == problem


@pytest.mark.parametrize(("setting", "expected"), [("", False), ("0", False), ("1", True), ("true", True)])
def test_interpreting_is_what_the_environment_says(setting: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", setting)
    assert device.interpreting() == expected


def test_providers_are_always_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = PluginHost.load().providers("attention")
    assert {"triton", "flash_attn", "flash_attn_3", "flashinfer"} <= set(found)
    ordered = sorted(found, key=lambda name: found[name].priority)  # type: ignore[attr-defined]
    assert ordered[-1] == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ordered = sorted(PluginHost.load().providers("attention").values(), key=lambda p: p.priority)  # type: ignore[attr-defined]
    assert ordered[-1].name == "torch", "interpreted kernels only run when named"
