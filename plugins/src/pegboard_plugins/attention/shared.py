"""Rows that begin with the same blocks: their common keys are gathered once and multiplied with all their queries at once."""

from __future__ import annotations

import torch

from pegboard_plugins.attention.constants import Constants, SinkColumns
from pegboard_plugins.attention.context import StepContext
from pegboard_plugins.attention.gather import Gather
from pegboard_plugins.attention.mask import causal_mask
from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.staging import BY_HEAD, Staging


class SharedSection:
    """Built once per step; ``run`` once per layer. Same results as ``Section`` up to rounding."""

    def __init__(self, rows: RowSet, common_blocks: int, context: StepContext) -> None:
        """``rows`` have their first ``common_blocks`` blocks in common, all before their new tokens; no window, no ALiBi."""
        shape = context.shape
        self._prefix = Gather(rows.prefix(common_blocks, shape.block_size), context, buffer="prefix")
        own = rows.after(common_blocks)
        keys = (common_blocks + int(own.num_blocks.max())) * shape.block_size
        per_row = keys * shape.num_heads * int(rows.query_len.max()) * shape.itemsize
        step = max(shape.limits.group_bytes // per_row, 1)
        self._parts = [_Part(own.take(slice(begin, begin + step)), self._prefix, context) for begin in range(0, len(rows), step)]

    @property
    def stagings(self) -> list[Staging]:
        """Where its rows' results are put."""
        return [part.staging for part in self._parts]

    def run(self, query: torch.Tensor, runs: torch.Tensor, out: torch.Tensor, constants: Constants) -> None:
        """As ``Section.run``."""
        self._prefix.run(runs)
        for part in self._parts:
            part.run(query, runs, out, constants)


class _Part:
    """Some of the rows; the first dimension of everything is the key head, then the row."""

    def __init__(self, rows: RowSet, prefix: Gather, context: StepContext) -> None:
        """``rows`` count from behind the common blocks."""
        shape = context.shape
        heads, group = shape.num_kv_heads, shape.group
        query_len = int(rows.query_len.max())
        dims = (heads, len(rows), query_len, group, shape.head_size)
        query, out = context.buffer("query", *dims), context.buffer("out", *dims)
        self.staging = Staging(rows, query, out, BY_HEAD)
        self._own = Gather(rows, context, by_head=True)
        self._query_by_head, self._query_by_row = query.flatten(1, 3), query.flatten(0, 1).flatten(1, 2)
        self._out_by_head, self._out_by_row = out.flatten(1, 3), out.flatten(0, 1).flatten(1, 2)
        self._prefix_key_t, self._own_key_t = prefix.key.transpose(1, 2), self._own.key.transpose(1, 2)
        self._prefix_value = prefix.value
        width = prefix.width + self._own.width
        self._whole = context.buffer("scores", heads, len(rows) * query_len * group, width + context.sink_columns)
        self._scores = self._whole[..., :width]
        self._prefix_scores = self._whole[..., : prefix.width]
        by_row = self._whole.view(heads * len(rows), query_len * group, -1)
        self._own_scores = by_row[..., prefix.width : width]
        by_head = self._whole.view(heads, len(rows), query_len, group, -1)
        self._sinks = SinkColumns(by_head[..., width:]) if context.sink_columns else None
        positions = rows.positions(0, query_len, shape.block_size)
        mask = causal_mask(positions, 0, self._own.width, context)
        self._masked = None if mask is None else mask.part_of(self._own_scores, by_head=True)
        self._mask = None if mask is None else mask.addend(by_head=True)

    def run(self, query: torch.Tensor, runs: torch.Tensor, out: torch.Tensor, constants: Constants) -> None:
        self.staging.load(query, constants.query)
        self._own.run(runs)
        torch.bmm(self._query_by_head, self._prefix_key_t, out=self._prefix_scores)
        torch.bmm(self._query_by_row, self._own_key_t, out=self._own_scores)
        if constants.soft_cap is not None:
            self._scores.tanh_().mul_(constants.soft_cap)
        if self._masked is not None:
            self._masked.add_(self._mask)
        if self._sinks is not None:
            assert constants.sinks is not None, "planned for layers with sinks"
            self._sinks.put(constants.sinks.unsqueeze(1))
        torch.softmax(self._whole, -1, out=self._whole)
        torch.bmm(self._prefix_scores, self._prefix_value, out=self._out_by_head)
        self._out_by_row.baddbmm_(self._own_scores, self._own.value)
        self.staging.store(out, constants.value)
