"""What differs from layer to layer in one plan, in the shapes in which the parts of a step use it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard.contracts.attention import AttentionLayer

Factor = float | torch.Tensor
"""A number, or one per query head as [heads, 1] float32."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a layer has that changes the plan of a step."""

    sliding_window: int | None
    alibi: bool
    sinks: bool

    @classmethod
    def of(cls, layer: AttentionLayer) -> Features:
        return cls(layer.sliding_window, layer.alibi_slopes is not None, layer.sinks is not None)


@dataclass(frozen=True, slots=True)
class Constants:
    """One layer's. Scales of the cache are met where there is least to multiply: by the queries and by the results."""

    query: Factor
    """Queries are multiplied with it before they meet the keys."""
    soft_cap: float | None
    value: Factor | None
    """Results are multiplied with it."""
    slopes: torch.Tensor | None
    """[kv heads, 1, group, 1]."""
    sinks: torch.Tensor | None
    """[kv heads, 1, group, 1]."""

    @classmethod
    def of(cls, layer: AttentionLayer) -> Constants:
        scale = layer.scale if layer.logits_soft_cap is None else layer.scale / layer.logits_soft_cap
        group = layer.num_heads // layer.num_kv_heads
        by_head = (layer.num_kv_heads, 1, group, 1)
        return cls(
            query=scale if layer.key_scale is None else scale * _by_query_head(layer.key_scale, group),
            soft_cap=layer.logits_soft_cap,
            value=None if layer.value_scale is None else _by_query_head(layer.value_scale, group),
            slopes=None if layer.alibi_slopes is None else layer.alibi_slopes.view(by_head),
            sinks=None if layer.sinks is None else layer.sinks.view(by_head),
        )


def _by_query_head(scale: float | torch.Tensor, group: int) -> Factor:
    return scale.float().repeat_interleave(group).unsqueeze(1) if isinstance(scale, torch.Tensor) else scale


class SinkColumns:
    """A key without a value beside the scores: one more column for the softmax, and some that weigh nothing, so that the width
    stays a multiple of what the processor computes at once."""

    def __init__(self, columns: torch.Tensor) -> None:
        """``columns``: part of the scores' buffer, [..., kv heads, queries, group, columns] or with the rows behind the heads."""
        self._sink, self._nothing = columns[..., :1], columns[..., 1:]

    def put(self, sinks: torch.Tensor) -> None:
        """``sinks``: numbers that can be expanded to the columns."""
        self._sink.copy_(sinks)
        self._nothing.fill_(float("-inf"))
