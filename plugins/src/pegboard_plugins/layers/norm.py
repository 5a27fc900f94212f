"""Root mean square normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension. ``F.rms_norm`` takes 5 µs at one row of 576 and accumulates
    in float32."""

    def __init__(self, name: str, size: int, eps: float) -> None:
        self.name, self.shape, self.eps = name, (size,), eps
        self.weight: torch.Tensor

    def load(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{self.name}.weight", self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """Multiplies with one plus the weight, in float32 until the result: narrow types have few numbers around one."""

    def load(self, weight: torch.Tensor) -> None:
        self.weight = 1.0 + weight.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)


class QueryKeyNorm:
    """RMSNorm of each query head and each key head, with one weight for all query heads and one for all key heads.

    ``forward`` takes queries and keys in one tensor [T, num_heads + num_kv_heads, head_size].
    """

    def __init__(self, name: str, num_heads: int, num_kv_heads: int, head_size: int, eps: float) -> None:
        self.name = name
        self.num_heads, self.num_kv_heads, self.shape, self.eps = num_heads, num_kv_heads, (head_size,), eps
        self.weight: torch.Tensor

    def load(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Weights [head_size] each, repeated per head here so that one multiplication does both."""
        self.weight = torch.cat((query.expand(self.num_heads, -1), key.expand(self.num_kv_heads, -1)))

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{self.name}.weight", self.weight

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(heads, self.shape, None, self.eps) * self.weight


class UnitOffsetQueryKeyNorm(QueryKeyNorm):
    """As ``UnitOffsetRMSNorm``."""

    def load(self, query: torch.Tensor, key: torch.Tensor) -> None:
        super().load(1.0 + query.float(), 1.0 + key.float())

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return super().forward(heads.float()).to(heads.dtype)
