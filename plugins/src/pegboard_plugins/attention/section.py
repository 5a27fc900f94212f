"""Rows with one query length: stage their queries by head, run their groups, put the results back in token order."""

from __future__ import annotations

import numpy as np
import torch

from .group import RowGroup
from . import plan
from .plan import RowSet, Shape, groups
from .workspace import Workspace


class Section:
    """Built once per step; ``run`` once per layer."""

    def __init__(
        self, rows: RowSet, block_table: torch.Tensor, shape: Shape, workspace: Workspace, dtype: torch.dtype, cache_dtype: torch.dtype
    ) -> None:
        """``dtype`` is the type in which attention computes, ``cache_dtype`` that of the cache."""
        query_len = int(rows.query_len.max())
        if query_len == 1 and len(rows) * int(rows.num_blocks.max()) * shape.block_size <= plan.EXACT_KEYS:
            dtype = torch.float32
        parts = groups(rows, shape)
        heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        dims = (len(rows), heads, query_len, group, shape.head_size)
        query = workspace.view("query", dtype, *dims)
        out = workspace.view("out", dtype, *dims)
        self._groups = []
        begin = 0
        for part in parts:
            end = begin + len(part)
            self._groups.append(RowGroup(part, block_table, query[begin:end], out[begin:end], shape, workspace, cache_dtype))
            begin = end
        self._by_token = (len(rows), query_len, heads, group, shape.head_size)
        self._flat = (len(rows) * query_len, shape.num_heads, shape.head_size)
        # One query per row is in token order as it is; several are sorted by head within a row.
        self._query = query.view(self._flat) if query_len == 1 else query.permute(0, 2, 1, 3, 4)
        self._out = out.view(self._flat) if query_len == 1 else out.permute(0, 2, 1, 3, 4)
        self._staged = self._flat if query_len == 1 else self._by_token
        self._place(parts, query_len, block_table.device)

    def _place(self, parts: list[RowSet], query_len: int, device: torch.device) -> None:
        """Which tokens the queries are: a span, or an index; with padding, also which staged queries are real."""
        start = np.concatenate([part.query_start for part in parts])
        count = np.concatenate([part.query_len for part in parts])
        step = np.arange(query_len)
        token = (start[:, None] + np.minimum(step, count[:, None] - 1)).ravel()
        self._span: tuple[int, int] | None = None
        self._token: torch.Tensor | None = None
        self._real: torch.Tensor | None = None
        self._real_token: torch.Tensor | None = None
        if (np.diff(token) == 1).all() and (count == query_len).all():
            self._span = (int(token[0]), int(token[-1]) + 1)
            return
        self._token = torch.from_numpy(token).to(device)
        self._real_token = self._token
        if not (count == query_len).all():
            real = np.flatnonzero((step < count[:, None]).ravel())
            self._real = torch.from_numpy(real).to(device)
            self._real_token = torch.from_numpy(token[real]).to(device)

    def run(self, query: torch.Tensor, runs: torch.Tensor, out: torch.Tensor, scale: float, soft_cap: float | None) -> None:
        """``query`` and ``out`` [T, heads, head size]; ``runs`` the layer's cache as [runs, block_size * head_size]."""
        self._stage(query, scale if soft_cap is None else scale / soft_cap)
        for group in self._groups:
            group.run(runs, soft_cap)
        self._unstage(out)

    def _stage(self, query: torch.Tensor, scale: float) -> None:
        if self._token is None:
            picked = query if self._span == (0, query.shape[0]) else query[self._span[0] : self._span[1]]
        else:
            picked = query.index_select(0, self._token)
        if self._staged is not self._flat:
            picked = picked.view(self._staged)
        if picked.dtype == self._query.dtype:
            torch.mul(picked, scale, out=self._query)
        else:
            self._query.copy_(picked).mul_(scale)

    def _unstage(self, out: torch.Tensor) -> None:
        if self._token is None:
            target = out if self._span == (0, out.shape[0]) else out[self._span[0] : self._span[1]]
            target.view(self._staged).copy_(self._out)
            return
        result = self._out.reshape(self._flat)
        if self._real is not None:
            result = result.index_select(0, self._real)
        out.index_copy_(0, self._real_token, result.to(out.dtype))
