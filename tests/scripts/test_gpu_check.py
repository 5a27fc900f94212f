"""The parts of scripts/gpu_check.py that need no GPU: its section on whole engines, on a device that records."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pegboard.plugins import AttentionBackendProvider, PlatformProvider, hookimpl
from pegboard.testing.graph_attention import GraphableAttention
from pegboard.testing.recorded_graphs import RecordingPlatform

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Recording:
    @hookimpl
    def platforms(self) -> Any:
        yield PlatformProvider(name="recording", target=RecordingPlatform)

    @hookimpl
    def attention_backends(self) -> Any:
        yield AttentionBackendProvider(name="graphable", target=GraphableAttention)


def settings() -> dict[str, Any]:
    """Small steps: this attention has every token read every block."""
    return {
        "device": "recording",
        "attention": "graphable",
        "max_model_len": 160,
        "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 64},
        "plugins": {"recording": Recording()},
        "executor": {"num_threads": 1},
    }


@pytest.mark.slow
def test_whole_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpu_checks import engine_speed

    assert [name for name in engine_speed.NEEDED if engine_speed.find_spec(name) is None] == []
    setup = engine_speed.Setup(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=1000,
        dtype="float32",
        batches=(1, 3),
        prompt=6,
        tokens=5,
        compiled=False,
        settings=settings(),
    )
    checks = list(engine_speed.speeds(tmp_path, torch.device("cpu"), setup))
    assert [check.name for check in checks] == [
        "pegboard eager, batch 1",
        "pegboard eager, batch 3",
        "memory of graphs",
        "pegboard graphs, batch 1",
        "pegboard graphs, batch 3",
        *(f"transformers {kind} cache, batch {batch}" for kind in ("dynamic", "static") for batch in (1, 3)),
    ]
    assert all(check.passed for check in checks), checks
    checks = list(engine_speed.same_tokens(tmp_path, rows=3, **settings()))
    assert [check.name for check in checks] == ["graphs are captured", "graphs give the eager tokens, float32"]
    assert all(check.passed for check in checks), checks


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--only", "engine"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "there is no CUDA device" in run.stderr


def test_sections_are_told_where_none_is_meant() -> None:
    run = subprocess.run([sys.executable, str(SCRIPTS / "gpu_check.py"), "--only", "sampler"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "'sampler': they are attention_kernels, attention_bandwidth, engine_speed" in run.stderr


def test_a_section_that_fails_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    pytest.importorskip("triton")
    import gpu_check
    from gpu_checks.report import Check

    def section(broken: bool) -> ModuleType:
        def run(device: torch.device) -> Iterator[Check]:
            assert device.type == "cuda"
            yield Check("first", True, "", {"rate": 1.0})
            if broken:
                raise RuntimeError("an illegal memory access")
            yield Check("second", True, "")

        made = ModuleType("section")
        made.run = run  # type: ignore[attr-defined]
        return made

    for name in gpu_check.SECTIONS:
        monkeypatch.setitem(sys.modules, f"gpu_checks.{name}", section(name == gpu_check.SECTIONS[1]))
    answers = {"is_available": True, "current_device": 0, "get_device_capability": (9, 0), "get_device_name": "stand-in"}
    for function, answer in {**answers, "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, answer=answer: answer)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--json", str(tmp_path / "results")])
    assert gpu_check.main() == 1
    found = json.loads((tmp_path / "results").read_text())
    assert [check["passed"] for check in found] == [True, True, True, False, True, True]
    assert found[0] == {"name": "first", "passed": True, "detail": "", "figures": {"rate": 1.0}}
    assert "an illegal memory access" in found[3]["detail"]
