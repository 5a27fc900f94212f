"""The kit against the plain backend: two implementations that share nothing agree, and the kit asks for nothing that only ours has."""

from __future__ import annotations

from pegboard.testing.conformance.attention import AttentionBackendConformance
from pegboard.testing.reference_attention import ReferenceAttentionBackend


class TestReferenceAttention(AttentionBackendConformance):
    backend = ReferenceAttentionBackend
