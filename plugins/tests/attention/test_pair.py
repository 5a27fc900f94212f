"""The kit against a pair: two instances of one backend that share the cache, one for decode rows, one for the others."""

from __future__ import annotations

from typing import Any

from pegboard.contracts.attention import AttentionBackend
from pegboard.plugins.attention_pair import pair
from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard_plugins.attention.torch_backend import TorchAttentionBackend


class Decode(TorchAttentionBackend):
    """Attends to rows with one new token, and to no other."""

    name = "decode_only"

    def build_metadata(self, common: Any) -> Any:
        assert set(common.query_start_loc[1:] - common.query_start_loc[:-1]) == {1}
        return super().build_metadata(common)


class Prefill(TorchAttentionBackend):
    name = "prefill_only"

    def build_metadata(self, common: Any) -> Any:
        assert (common.query_start_loc[1:] - common.query_start_loc[:-1] > 1).all()
        return super().build_metadata(common)


def make(backend: type[AttentionBackend], offered: dict[str, Any]) -> AttentionBackend:
    return backend(**offered)


class TestPair(AttentionBackendConformance):
    backend = pair(Prefill, Decode, make)
