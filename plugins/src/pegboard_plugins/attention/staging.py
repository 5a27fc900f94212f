"""Queries come in token order and are computed by row and head; results go back. Both ways, with and without an index."""

from __future__ import annotations

import numpy as np
import torch

from .plan import RowSet

BY_ROW = (0, 2, 1, 3, 4)
"""[rows, kv heads, queries, group, head size] out of [rows, queries, kv heads, group, head size]."""
BY_HEAD = (2, 0, 1, 3, 4)
"""[kv heads, rows, queries, group, head size]."""


class Staging:
    """Where the queries of some rows are among the step's tokens, and the buffers in which they are computed."""

    def __init__(self, rows: RowSet, query: torch.Tensor, out: torch.Tensor, order: tuple[int, ...]) -> None:
        """``query`` and ``out`` are buffers whose dimensions are in ``order``."""
        back = [order.index(axis) for axis in range(len(order))]
        by_token = query.permute(back)
        num_rows, query_len, kv_heads, group, head_size = by_token.shape
        self._flat = (num_rows * query_len, kv_heads * group, head_size)
        # One query per row, sorted by row, is in token order as it is.
        self._plain = query_len == 1 and order == BY_ROW
        self._shape = self._flat if self._plain else tuple(by_token.shape)
        self._query = query.view(self._flat) if self._plain else by_token
        self._out = out.view(self._flat) if self._plain else out.permute(back)
        self._place(rows, query_len, query.device)

    def _place(self, rows: RowSet, query_len: int, device: torch.device) -> None:
        """Which tokens the queries are: a span, or an index; with padded rows, also which staged queries are real."""
        step = np.arange(query_len)
        token = (rows.query_start[:, None] + np.minimum(step, rows.query_len[:, None] - 1)).ravel()
        padded = bool((rows.query_len != query_len).any())
        self._begin, self._end = int(token[0]), int(token[-1]) + 1
        self._token: torch.Tensor | None = None
        self._real: torch.Tensor | None = None
        if padded or (np.diff(token) != 1).any():
            self._token = self._real_token = torch.from_numpy(token).to(device)
        if padded:
            real = np.flatnonzero((step < rows.query_len[:, None]).ravel())
            self._real = torch.from_numpy(real).to(device)
            self._real_token = torch.from_numpy(token[real]).to(device)

    def load(self, query: torch.Tensor, scale: float) -> None:
        """Scaled queries into the buffer. ``query`` [T, heads, head size]."""
        picked = self._span(query) if self._token is None else query.index_select(0, self._token)
        if not self._plain:
            picked = picked.view(self._shape)
        if picked.dtype == self._query.dtype:
            torch.mul(picked, scale, out=self._query)
        else:
            self._query.copy_(picked).mul_(scale)

    def store(self, out: torch.Tensor) -> None:
        """Results from the buffer to their tokens in ``out`` [T, heads, head size]."""
        if self._token is None:
            target = self._span(out)
            (target if self._plain else target.view(self._shape)).copy_(self._out)
            return
        result = self._out.reshape(self._flat)
        if self._real is not None:
            result = result.index_select(0, self._real)
        out.index_copy_(0, self._real_token, result.to(out.dtype))

    def _span(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._begin == 0 and self._end == tokens.shape[0]:
            return tokens
        return tokens[self._begin : self._end]
