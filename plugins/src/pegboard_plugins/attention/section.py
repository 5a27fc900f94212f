"""Rows with one query length: stage their queries by head, run their groups, put the results back in token order."""

from __future__ import annotations

import torch

from pegboard_plugins.attention.constants import Constants
from pegboard_plugins.attention.context import StepContext
from pegboard_plugins.attention.group import RowGroup
from pegboard_plugins.attention.plan import groups
from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.staging import BY_ROW, Staging


class Section:
    """Built once per step; ``run`` once per layer."""

    def __init__(self, rows: RowSet, context: StepContext) -> None:
        shape = context.shape
        parts = groups(rows, shape)
        rows = RowSet.concatenate(parts)
        query_len = int(rows.query_len.max())
        dims = (len(rows), shape.num_kv_heads, query_len, shape.group, shape.head_size)
        query, out = context.buffer("query", *dims), context.buffer("out", *dims)
        self._staging = Staging(rows, query, out, BY_ROW)
        self._groups = []
        begin = 0
        for part in parts:
            end = begin + len(part)
            self._groups.append(RowGroup(part, query[begin:end], out[begin:end], context))
            begin = end

    @property
    def stagings(self) -> list[Staging]:
        """Where its rows' results are put."""
        return [self._staging]

    def run(self, query: torch.Tensor, runs: torch.Tensor, out: torch.Tensor, constants: Constants) -> None:
        """``query`` and ``out`` [T, heads, head size]; ``runs`` the layer's cache as [runs, block_size * head_size]."""
        self._staging.load(query, constants.query)
        for group in self._groups:
            group.run(runs, constants)
        self._staging.store(out, constants.value)
