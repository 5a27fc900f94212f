from __future__ import annotations

import pytest

from pegboard.contracts.attention import AttentionBackend, AttentionQuery
from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard_plugins.attention import plan, torch_backend
from pegboard_plugins.attention.torch_backend import TorchAttentionBackend


class TestTorchAttention(AttentionBackendConformance):
    backend = TorchAttentionBackend


class TestSmallGroups(AttentionBackendConformance):
    """The same with every threshold so low that rows are cut, tiled and shared wherever that is possible."""

    backend = TorchAttentionBackend

    @pytest.fixture(autouse=True)
    def low_thresholds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan, "GROUP_BYTES", 60_000)
        monkeypatch.setattr(plan, "PADDING_BLOCKS", 1)
        monkeypatch.setattr(plan, "SHARED_BLOCKS", 1)
        monkeypatch.setattr(plan, "TILE_SCORES", 1)
        monkeypatch.setattr(plan, "MIN_TILE", 4)
        monkeypatch.setattr(torch_backend, "EXACT_KEYS", 0)


def test_refusals_name_the_value() -> None:
    query = AttentionQuery("cpu", "float32", "float8_e4m3fn", 9, 3, 64, 16, alibi=True)
    support = TorchAttentionBackend.supports(query)
    assert not support.ok
    assert any("float8_e4m3fn" in reason for reason in support.reasons)
    assert any("ALiBi" in reason for reason in support.reasons)


def test_it_is_a_backend() -> None:
    assert issubclass(TorchAttentionBackend, AttentionBackend)
    assert TorchAttentionBackend.graph_support == "never"
