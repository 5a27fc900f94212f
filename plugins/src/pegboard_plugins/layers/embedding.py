"""Token embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


class TokenEmbedding:
    """[T] ids to [T, hidden_size]. The table stays plain: rows are read by index."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight: torch.Tensor

    def load(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{self.name}.weight", self.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)
