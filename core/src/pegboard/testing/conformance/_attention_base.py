"""What the parts of the attention kit share: how a backend is made, which queries it is asked, and the shapes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from pegboard.contracts.attention import AttentionBackend, AttentionQuery

GEOMETRIES = {
    "smollm2": (9, 3, 64, 16),
    "llama3": (32, 8, 64, 16),
    "no_groups": (4, 4, 32, 8),
    "one_kv_head": (8, 1, 64, 32),
    "wide_head": (4, 2, 128, 64),
    "odd_head": (6, 2, 80, 16),
}
"""num_heads, num_kv_heads, head_size, block_size."""

LIMITS = {"plain": (None, None), "window": (24, None), "soft_cap": (None, 5.0), "window_and_cap": (9, 20.0)}
"""sliding_window, logits_soft_cap."""


class AttentionKit:
    """Subclasses give ``backend``."""

    backend: ClassVar[type[AttentionBackend]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def make(self, query: AttentionQuery) -> AttentionBackend:
        """A fresh backend for ``query``, which ``supports`` accepted."""
        return self.backend(query)  # type: ignore[call-arg]

    def query(self, geometry: str = "smollm2", dtype: str = "float32", limits: str = "plain", **changes: Any) -> AttentionQuery:
        """A query, or a skipped test where the backend refuses it."""
        heads, kv_heads, head_size, block_size = GEOMETRIES[geometry]
        window, cap = LIMITS[limits]
        query = AttentionQuery(
            device=self.device,
            dtype=dtype,
            kv_dtype=dtype,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            block_size=block_size,
            sliding_window=window,
            logits_soft_cap=cap,
        )
        query = dataclasses.replace(query, **changes)
        support = self.backend.supports(query)
        if dtype not in self.dtypes or not support.ok:
            pytest.skip("; ".join(support.reasons) or f"{dtype} is not tested here")
        return query

    def session(self, query: AttentionQuery, **options: Any) -> Any:
        """An ``AttentionSession`` on a fresh backend."""
        from pegboard.testing.attention_session import AttentionSession

        return AttentionSession(self.make, query, **options)
