"""Attention backends around another one, which do something more for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionQuery, CommonAttentionMetadata, Support

B = TypeVar("B", bound="DelegatingBackend")


class DelegatingBackend(AttentionBackend):
    """Like ``inner`` in everything. Made by ``_around``, which declares what the class of ``inner`` does."""

    inner_class: ClassVar[type[AttentionBackend]]

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        return cls.inner_class.supports(query)

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return cls.inner_class.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def move_blocks(cls, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        cls.inner_class.move_blocks(source, target, pairs)

    def build_metadata(self, common: CommonAttentionMetadata) -> Any:
        return self.inner.build_metadata(common)

    def graph_metadata(self, num_rows: int, max_blocks: int) -> Any:
        return self.inner.graph_metadata(num_rows, max_blocks)

    def refill(self, metadata: Any, common: CommonAttentionMetadata) -> None:
        self.inner.refill(metadata, common)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return self.inner.forward(self.seen(layer, key, value), query, key, value, kv_cache, metadata, out)

    def seen(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> AttentionLayer:
        """What ``inner`` gets as the layer."""
        return layer


class ScaledBackend(DelegatingBackend):
    """Knows the scales of the layers, of which a model knows nothing."""

    layers: Mapping[str, AttentionLayer]

    def seen(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> AttentionLayer:
        return self.layers[layer.name]


class RecordingBackend(DelegatingBackend):
    """Notes the largest numbers among the keys and the values of each head."""

    largest: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """By layer, each [num_kv_heads] float32."""

    def seen(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> AttentionLayer:
        keys, values = (x.abs().amax(dim=(0, 2)).float() for x in (key, value))
        self.largest[layer.name] = (keys, values)
        return layer


def scaled(inner: AttentionBackend, layers: Mapping[str, AttentionLayer]) -> ScaledBackend:
    """``layers``: by name, with their scales."""
    made = _around(ScaledBackend, inner)
    made.layers = layers
    return made


def recording(inner: AttentionBackend) -> RecordingBackend:
    made = _around(RecordingBackend, inner)
    made.largest = {}
    return made


def _around(kind: type[B], inner: AttentionBackend) -> B:
    declared = {"name": inner.name, "graph_support": inner.graph_support, "kv_layout": inner.kv_layout}
    made: type[B] = type(kind.__name__, (kind,), {**declared, "inner_class": type(inner)})
    return made(inner)
