"""The kit against the plain backend: it asks for nothing that only the standard backend does."""

from __future__ import annotations

from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard.testing.reference_attention import ReferenceAttentionBackend


class TestReferenceAttention(AttentionBackendConformance):
    backend = ReferenceAttentionBackend
