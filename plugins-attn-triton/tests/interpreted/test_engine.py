"""Whole engines on interpreted kernels, on the adapters with stand-ins for their libraries, and on pairs of backends."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.conformance.attention_engine import AttentionEngineConformance

HALF = {"dtype": "float16"}


class TestEnginesOnEveryBackend(AttentionEngineConformance):
    backends = {
        "triton": {},
        "torch,triton": {},
        "triton,torch int8": {"block_size": 16, "kv_dtype": "int8"},
        "flash_attn": {**HALF, "block_size": 256},
        "flash_attn_3": HALF,
        "flashinfer": HALF,
    }
    checkpoint = {"num_layers": 1, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 192}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _libraries(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(Path(__file__).parent / "libraries")
            for name in ("flash_attn", "flash_attn_interface", "flashinfer"):
                importlib.import_module(name)
            yield


def test_auto_is_the_standard_backend(tmp_path: Path) -> None:
    """Interpreted kernels are never chosen, only named: this is done in no time."""
    folder = make_checkpoint(tmp_path, num_layers=1, num_heads=3, num_kv_heads=1, hidden_size=48)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache": {"num_blocks": 40}, "executor": {"num_threads": 1}}
    found = []
    for backend in ("torch", "auto"):
        with LLM(str(folder), attention={"backend": backend}, **options) as llm:
            [answer] = llm.generate([[5, 9, 200, 31, 7, 7, 13]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
            found.append(answer.outputs[0].token_ids)
    assert found[0] == found[1]
