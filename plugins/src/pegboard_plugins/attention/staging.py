"""Queries come in token order and are computed by row and head; results go back. Both ways, with and without an index."""

from __future__ import annotations

import numpy as np
import torch

from pegboard_plugins.attention.constants import Factor
from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.workspace import Workspace

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
        """Which tokens the queries are: a span, or an index; and which staged queries are real, not padding."""
        step = np.arange(query_len)
        token = (rows.query_start[:, None] + np.minimum(step, rows.query_len[:, None] - 1)).ravel()
        self.real = np.flatnonzero((step < rows.query_len[:, None]).ravel())
        self.real_token = token[self.real]
        self._begin, self._end = int(token[0]), int(token[-1]) + 1
        self.is_span = bool((np.diff(token) == 1).all())
        self._token = None if self.is_span else torch.from_numpy(token).to(device)
        self._result: torch.Tensor | None = None

    @property
    def heads(self) -> tuple[int, int]:
        """Heads and head size."""
        return self._flat[1:]

    @property
    def num_queries(self) -> int:
        """Staged queries, padding included."""
        return self._flat[0]

    def collect_in(self, results: torch.Tensor) -> None:
        """From now on ``store`` puts everything, padding included, into ``results`` [num_queries, heads, head size]."""
        self._result = results.view(self._shape)

    def load(self, query: torch.Tensor, factor: Factor) -> None:
        """Queries times ``factor`` into the buffer. ``query`` [T, heads, head size]."""
        picked = self._span(query) if self._token is None else query.index_select(0, self._token)
        if not self._plain:
            picked = picked.view(self._shape)
        if picked.dtype == self._query.dtype:
            torch.mul(picked, self._shaped(factor), out=self._query)
        else:
            self._query.copy_(picked).mul_(self._shaped(factor))

    def store(self, out: torch.Tensor, factor: Factor | None) -> None:
        """Results times ``factor`` from the buffer to their tokens in ``out`` [T, heads, head size], or to where they are
        collected."""
        target = self._result
        if target is None:
            target = self._span(out) if self._plain else self._span(out).view(self._shape)
        if factor is None:
            target.copy_(self._out)
        else:
            torch.mul(self._out, self._shaped(factor), out=target)

    def _shaped(self, factor: Factor) -> Factor:
        """By query head as the buffers have them."""
        if self._plain or not isinstance(factor, torch.Tensor):
            return factor
        return factor.view(*self._shape[-3:-1], 1)

    def _span(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._begin == 0 and self._end == tokens.shape[0]:
            return tokens
        return tokens[self._begin : self._end]


class Collector:
    """Puts the results of all sections in token order with one operation, for a step in which some section has no span of tokens.

    Scattering rows with an index costs several times as much as copying them out by the inverse index.
    """

    def __init__(self, stagings: list[Staging], num_tokens: int, workspace: Workspace, dtype: torch.dtype) -> None:
        total = sum(staging.num_queries for staging in stagings)
        heads = stagings[0].heads
        self._results = workspace.view("results", dtype, total, *heads)
        order = np.empty(num_tokens, np.int64)
        begin = 0
        for staging in stagings:
            order[staging.real_token] = begin + staging.real
            end = begin + staging.num_queries
            staging.collect_in(self._results[begin:end])
            begin = end
        self._order = torch.from_numpy(order).to(self._results.device)

    def store(self, out: torch.Tensor) -> None:
        """All results to ``out`` [T, heads, head size]."""
        torch.index_select(self._results, 0, self._order, out=out)
