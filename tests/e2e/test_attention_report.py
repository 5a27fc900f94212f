"""``pegboard plugins show attention``: which backends serve a model on this machine, and why others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegboard.entrypoints.cli.main import main
from pegboard.testing.checkpoints import make_checkpoint

LAYERS = "4 heads and 2 key heads of 16, float32, cache of float32 in blocks of 16, on cpu"


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(*arguments: object) -> str:
        assert main(["plugins", "show", "attention", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return ask


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A full layer after every windowed one."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return make_checkpoint(
        tmp_path / "mixed",
        architecture="Qwen2ForCausalLM",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        config_overrides={"layer_types": kinds, "sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0},
    )


def test_every_kind_of_layers_and_every_backend(show: Any, mixed: Path) -> None:
    lines = show("--model", mixed).splitlines()
    kinds = [line for line in lines if line.startswith("layers: ")]
    assert kinds == [f"layers: 2 x {LAYERS}, window of 24", f"layers: 2 x {LAYERS}"]
    assert lines.count("  chosen: torch (supports the query, priority 0)") == 2
    assert lines.count("  torch: qualifies") == 2
    assert sum(line.startswith("  triton: on a processor the kernels only run interpreted") for line in lines) == 2


def test_without_a_model_only_what_is_installed(show: Any) -> None:
    assert "layers: " not in show()


def test_the_file_s_model_and_settings_count(show: Any, mixed: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        f'model = "{mixed}"\nattention = "triton,torch"\n[kv_cache]\ndtype = "int8"\n[executor]\ntensor_parallel_size = 2'
    )
    (kind,) = json.loads(show("--config", file, "--json"))
    windowed, full = kind["layers"]
    assert windowed["layers"].startswith(
        "2 x 2 heads and 1 key heads of 16, float32, cache of int8 in blocks of 16, on cpu, window"
    )
    assert full["layers"].endswith("on cpu, scales per head")
    assert full["chosen"] == "none: triton of attention.backend cannot serve them"
    assert full["backends"]["torch"] == "qualifies"
    assert "scales" in full["backends"]["flash_attn"]


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "attention", "--model", "/nowhere/model"]) == 2
    assert "/nowhere/model" in capsys.readouterr().err
