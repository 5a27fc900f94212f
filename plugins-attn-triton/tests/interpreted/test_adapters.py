"""The adapters on stand-ins for their libraries, which compute attention from the arguments they get and keep the same rules.

A wrong layout, length or cumulated sum changes the result or breaks a rule. The folder ``libraries`` holds the stand-ins.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from pegboard.contracts.attention import AttentionBackend, AttentionQuery
from pegboard.plugins.attention_pair import pair
from pegboard.testing.attention_session import AttentionSession
from pegboard_attn_triton.adapters.flash_attention import FlashAttention2Backend, FlashAttention3Backend
from pegboard_attn_triton.adapters.flashinfer import FlashInferBackend
from pegboard_attn_triton.backend import TritonAttentionBackend

LIBRARIES = {
    FlashAttention2Backend: "flash_attn",
    FlashAttention3Backend: "flash_attn_interface",
    FlashInferBackend: "flashinfer",
}
BASE = AttentionQuery("cpu", "float16", "float16", 6, 2, 64, 16)


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "libraries")
    for name in LIBRARIES.values():
        importlib.import_module(name).calls.clear()


def calls(backend: type[AttentionBackend]) -> list[str]:
    return importlib.import_module(LIBRARIES[backend]).calls  # type: ignore[no-any-return]


def session(backend: type[AttentionBackend], **changes: Any) -> AttentionSession:
    size = 256 if backend is FlashAttention2Backend else 16
    query = dataclasses.replace(BASE, **{"block_size": size, **changes})
    assert backend.supports(query).reasons == ()
    return AttentionSession(backend, query, num_blocks=24)


FEATURES: list[tuple[type[AttentionBackend], dict[str, Any]]] = [
    *((backend, changes) for backend in LIBRARIES for changes in ({}, {"sliding_window": 7}, {"logits_soft_cap": 4.0})),
    (FlashAttention2Backend, {"alibi": True}),
    (FlashAttention2Backend, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}),
    (FlashAttention3Backend, {"block_size": 8}),
    (FlashInferBackend, {"kv_dtype": "float8_e4m3fn"}),
    (FlashInferBackend, {"kv_dtype": "float8_e4m3fn", "kv_scales": "tensor", "block_size": 32}),
]


@pytest.mark.parametrize(("backend", "changes"), FEATURES)
def test_mixed_steps_equal_plain_attention(backend: type[AttentionBackend], changes: dict[str, Any]) -> None:
    made = session(backend, **changes)
    made.check([("a", 5), ("b", 1), ("c", 37)])
    made.check([("a", 1), ("pad", 0), ("d", 17), ("c", 3), ("b", 1)])
    made.check([("a", 1), ("b", 1), ("pad", 0), ("c", 1), ("d", 1)])
    assert calls(backend)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_metadata_made_ahead_and_shared_by_layers(backend: type[AttentionBackend]) -> None:
    made = session(backend)
    first = made.prepare([("a", 4), ("b", 20)])
    metadata = made.backend.build_metadata(first.common)
    second = made.prepare([("a", 1), ("b", 1)])
    ahead = made.backend.build_metadata(second.common)
    for _ in range(2):
        made.compare(made.run(first, metadata=metadata), first.expected)
    made.compare(made.run(second, metadata=ahead), second.expected)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_step_without_tokens(backend: type[AttentionBackend]) -> None:
    made = session(backend)
    made.check([("a", 4), ("b", 20)])
    step = made.prepare([("a", 0), ("b", 0)])
    assert made.run(step).shape[0] == 0


def test_flashinfer_plans_once_per_step_and_set_of_constants() -> None:
    made = session(FlashInferBackend)
    step = made.prepare([("a", 9), ("b", 1)])
    metadata = made.backend.build_metadata(step.common)
    for _ in range(3):
        made.run(step, metadata=metadata)
    assert calls(FlashInferBackend).count("plan prefill") == 1
    made.layer = dataclasses.replace(made.layer, sliding_window=3)
    made.run(step, metadata=metadata)
    assert calls(FlashInferBackend).count("plan prefill") == 2
    made.layer = dataclasses.replace(made.layer, sliding_window=None)
    made.check([("a", 1), ("b", 1)])
    assert calls(FlashInferBackend)[-2:] == ["plan decode", "BatchDecodeWithPagedKVCacheWrapper"]


def test_a_library_for_prefill_and_triton_for_decode() -> None:
    def make(backend: type[AttentionBackend], offered: dict[str, Any]) -> AttentionBackend:
        return backend(**offered)

    made = AttentionSession(pair(FlashInferBackend, TritonAttentionBackend, make), BASE)
    made.check([("a", 20), ("b", 1), ("c", 3)])
    before = len(calls(FlashInferBackend))
    made.check([("a", 1), ("b", 1), ("c", 1)])
    assert len(calls(FlashInferBackend)) == before, "decode rows are not its own"
    made.check([("b", 1), ("d", 33), ("a", 1), ("e", 2)], forks={"e": ("d", 32)})
    assert len(calls(FlashInferBackend)) > before
    graph = made.backend.graph_metadata(4, 8)
    step = made.prepare([("a", 1), ("d", 1)])
    made.backend.refill(graph, step.common)
    made.compare(made.replay(graph, step, 4)[:2], step.expected)
