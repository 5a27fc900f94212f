"""The conformance kit against the interpreted kernels, in large tiles, which take least time; small ones: ``test_tiles.py``."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.contracts.attention import AttentionQuery
from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard_attn_triton.backend import TritonAttentionBackend

LEFT_OUT = {("llama3", "float32", "window"), ("llama3", "float32", "soft_cap"), ("llama3", "float16", "window_and_cap")}
"""Eight key heads are eight times the programs."""


class TestTriton(AttentionBackendConformance):
    backend = TritonAttentionBackend
    dtypes = ("float32", "float16")

    def query(self, geometry: str = "smollm2", dtype: str = "float32", limits: str = "plain", **changes: Any) -> AttentionQuery:
        once_is_enough = dtype == "float16" and not changes and limits != "window_and_cap"
        if (geometry, dtype, limits) in LEFT_OUT or once_is_enough:
            pytest.skip("a sample is enough, as the interpreter takes its time")
        return super().query(geometry, dtype, limits, **changes)
