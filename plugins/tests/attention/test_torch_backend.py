from __future__ import annotations

from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard_plugins.attention.torch_backend import TorchAttentionBackend


class TestTorchAttention(AttentionBackendConformance):
    backend = TorchAttentionBackend
