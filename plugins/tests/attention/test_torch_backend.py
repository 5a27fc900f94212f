from __future__ import annotations

from pegboard.contracts.attention import AttentionBackend, AttentionQuery
from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard_plugins.attention.shape import ACCELERATOR, Limits
from pegboard_plugins.attention.torch_backend import TorchAttentionBackend


class TestTorchAttention(AttentionBackendConformance):
    backend = TorchAttentionBackend


class TestSmallGroups(AttentionBackendConformance):
    """The same with limits so low that rows are cut, tiled and shared wherever that is possible."""

    backend = TorchAttentionBackend

    def make(self, query: AttentionQuery) -> AttentionBackend:
        backend = TorchAttentionBackend(query)
        backend.limits = Limits(group_bytes=60_000, padding_blocks=1, tile_scores=1, min_tile=4, max_tile=8, shared_blocks=1)
        return backend


class TestAcceleratorLimits(AttentionBackendConformance):
    """The same with the limits of large devices: hardly anything is cut."""

    backend = TorchAttentionBackend

    def make(self, query: AttentionQuery) -> AttentionBackend:
        backend = TorchAttentionBackend(query)
        backend.limits = ACCELERATOR
        return backend


def test_refusals_name_the_value() -> None:
    query = AttentionQuery("cpu", "float32", "float8_e4m3fn", 9, 3, 64, 16, alibi=True)
    support = TorchAttentionBackend.supports(query)
    assert not support.ok
    assert any("float8_e4m3fn" in reason for reason in support.reasons)
    assert any("ALiBi" in reason for reason in support.reasons)


def test_it_is_a_backend() -> None:
    assert issubclass(TorchAttentionBackend, AttentionBackend)
    assert TorchAttentionBackend.graph_support == "never"
