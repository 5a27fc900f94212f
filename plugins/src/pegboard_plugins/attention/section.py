"""Rows with one query length: stage their queries by head, run their groups, put the results back in token order."""

from __future__ import annotations

import torch

from . import plan
from .group import RowGroup
from .plan import RowSet, Shape
from .staging import BY_ROW, Staging
from .workspace import Workspace


class Section:
    """Built once per step; ``run`` once per layer."""

    def __init__(
        self,
        rows: RowSet,
        block_table: torch.Tensor,
        shape: Shape,
        workspace: Workspace,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
    ) -> None:
        """``dtype`` is the type in which attention computes, ``cache_dtype`` that of the cache."""
        parts = plan.groups(rows, shape)
        rows = RowSet.concatenate(parts)
        query_len = int(rows.query_len.max())
        dims = (len(rows), shape.num_kv_heads, query_len, shape.num_heads // shape.num_kv_heads, shape.head_size)
        query, out = workspace.view("query", dtype, *dims), workspace.view("out", dtype, *dims)
        self._staging = Staging(rows, query, out, BY_ROW)
        self._groups = []
        begin = 0
        for part in parts:
            end = begin + len(part)
            self._groups.append(RowGroup(part, block_table, query[begin:end], out[begin:end], shape, workspace, cache_dtype))
            begin = end

    @property
    def stagings(self) -> list[Staging]:
        """Where its rows' results are put."""
        return [self._staging]

    def run(self, query: torch.Tensor, runs: torch.Tensor, out: torch.Tensor, scale: float, soft_cap: float | None) -> None:
        """``query`` and ``out`` [T, heads, head size]; ``runs`` the layer's cache as [runs, block_size * head_size]."""
        self._staging.load(query, scale if soft_cap is None else scale / soft_cap)
        for group in self._groups:
            group.run(runs, soft_cap)
        self._staging.store(out)
