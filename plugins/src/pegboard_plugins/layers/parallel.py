"""Layers that tensor-parallel ranks share. Each rank holds a part of the weight; what goes in and comes out is the same on all.

Column-parallel layers (queries, keys and values; gate and up) hold rows of the [out, in] weight and need nothing of their own:
they are plain layers with fewer outputs. The row-parallel layer after them holds columns, and sums over ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pegboard.contracts.communicator import Communicator
from pegboard_plugins.layers.embedding import TokenEmbedding
from pegboard_plugins.layers.linear import Linear
from pegboard_plugins.layers.linear_methods import FusedLinearMethod


class RowParallelLinear(Linear):
    """Each rank multiplies its part of the input; the products are summed. Rank 0 alone holds the bias.

    The residual is added to the sum, not to one rank's product: in a narrow type that would round it twice. And adding it
    afterwards costs little where ranks wait for one another anyway.
    """

    def __init__(self, name: str, method: FusedLinearMethod, communicator: Communicator) -> None:
        super().__init__(name, method)
        self._communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_reduce(super().forward(x))

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.forward(x).add_(residual)


class VocabParallelEmbedding(TokenEmbedding):
    """Each rank holds the rows of ``num_rows`` ids from ``first_id`` on, padded where the vocabulary ends; all others add
    zeros to them, so the sum is exact."""

    def __init__(self, name: str, first_id: int, num_rows: int, communicator: Communicator) -> None:
        super().__init__(name)
        self._first_id, self._num_rows, self._communicator = first_id, num_rows, communicator

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = input_ids - self._first_id
        elsewhere = (rows < 0) | (rows >= self._num_rows)
        found = F.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        return self._communicator.all_reduce(found.masked_fill_(elsewhere[:, None], 0.0))


class VocabParallelHead(Linear):
    """Each rank computes the logits of its ids; all get those of the whole vocabulary, in order and without padding."""

    def __init__(self, name: str, method: FusedLinearMethod, vocab_size: int, communicator: Communicator) -> None:
        super().__init__(name, method)
        self._vocab_size, self._communicator = vocab_size, communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_gather(super().forward(x), -1)[:, : self._vocab_size]
