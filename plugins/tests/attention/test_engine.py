"""Engines on the standard backend, with every type of cache."""

from __future__ import annotations

from pegboard.testing.conformance.attention_engine import AttentionEngineConformance


class TestEnginesOnTorch(AttentionEngineConformance):
    backends = {
        "torch": {"block_size": 16},
        "torch int8": {"kv_dtype": "int8"},
        "torch float8": {"kv_dtype": "fp8_e4m3"},
        "torch half": {"kv_dtype": "float16"},
    }
    checkpoint = {"num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "hidden_size": 48}
