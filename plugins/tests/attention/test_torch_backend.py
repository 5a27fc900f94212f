from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pegboard.contracts.attention import AttentionBackend, AttentionQuery
from pegboard.testing.attention_session import AttentionSession, layer_of
from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard_plugins.attention.shape import ACCELERATOR, Limits
from pegboard_plugins.attention.stored import widen
from pegboard_plugins.attention.torch_backend import TorchAttentionBackend


def with_low_limits(query: AttentionQuery) -> TorchAttentionBackend:
    backend = TorchAttentionBackend(query)
    backend.limits = Limits(group_bytes=60_000, padding_blocks=1, tile_scores=1, min_tile=4, max_tile=8, shared_blocks=1)
    return backend


class TestTorchAttention(AttentionBackendConformance):
    backend = TorchAttentionBackend


class TestSmallGroups(AttentionBackendConformance):
    """The same with limits so low that rows are cut, tiled and shared wherever that is possible."""

    backend = TorchAttentionBackend

    def make(self, query: AttentionQuery) -> AttentionBackend:
        return with_low_limits(query)


class TestAcceleratorLimits(AttentionBackendConformance):
    """The same with the limits of large devices: hardly anything is cut."""

    backend = TorchAttentionBackend

    def make(self, query: AttentionQuery) -> AttentionBackend:
        backend = TorchAttentionBackend(query)
        backend.limits = ACCELERATOR
        return backend


def test_refusals_name_the_value() -> None:
    query = AttentionQuery("tpu", "float64", "float8_e5m2", 9, 2, 64, 16)
    support = TorchAttentionBackend.supports(query)
    assert not support.ok
    for named in ("'tpu'", "'float64'", "'float8_e5m2'", "9 heads"):
        assert any(named in reason for reason in support.reasons)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_float8_is_widened_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    stored = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    wide = torch.empty(stored.shape, dtype=dtype)
    widen(stored, wide)
    assert wide.equal(stored.to(dtype))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 30}, {"alibi": True}, {"sinks": True}])
def test_layers_of_one_group_may_differ(changes: dict[str, Any], kv_dtype: str) -> None:
    """One metadata, made for the group's query, for a layer of other features; rows that share blocks among them."""
    query = AttentionQuery("cpu", "float32", kv_dtype, 6, 2, 32, 8, kv_scales="head")
    session = AttentionSession(with_low_limits, query, num_blocks=96)
    session.layer = layer_of(dataclasses.replace(query, **changes))
    session.check([("a", 40), ("b", 3)])
    session.fork("a", "c", 40)
    session.fork("a", "d", 32)
    session.check([("a", 1), ("b", 1), ("c", 9), ("d", 9)])
    session.check([("a", 1), ("c", 1), ("b", 1), ("d", 1)])


def test_it_is_a_backend() -> None:
    assert issubclass(TorchAttentionBackend, AttentionBackend)
    assert TorchAttentionBackend.graph_support == "never"
