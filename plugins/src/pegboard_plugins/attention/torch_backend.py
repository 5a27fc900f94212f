"""Paged attention with torch operations: prefill, chunked prefill and decode rows mixed in one call, on any device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pegboard.contracts.attention import (
    AttentionLayer,
    AttentionQuery,
    CommonAttentionMetadata,
    GraphSupport,
    SplitAttentionBackend,
    Support,
)
from pegboard_plugins.attention.cache_layout import KV_LAYOUT, kv_cache_shape, slot_rows, write_tokens
from pegboard_plugins.attention.constants import Constants, Features
from pegboard_plugins.attention.context import StepContext
from pegboard_plugins.attention.plan import sections, shared_sets
from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.section import Section
from pegboard_plugins.attention.shape import ACCELERATOR, CPU, Shape
from pegboard_plugins.attention.shared import SharedSection
from pegboard_plugins.attention.staging import Collector
from pegboard_plugins.attention.stored import STORED_DTYPES, movable, to_stored
from pegboard_plugins.attention.workspace import Workspace

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CACHE_DTYPES = {**_DTYPES, **STORED_DTYPES}
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How one step is computed."""

    sections: list[Section | SharedSection]
    collector: Collector | None
    """Where the sections' results go first, if some section's tokens are not adjacent."""


class TorchMetadata:
    """One step's plans: one for layers with the features of the group's query, and others when they are first asked for."""

    def __init__(self, backend: TorchAttentionBackend, common: CommonAttentionMetadata) -> None:
        self.rows = slot_rows(common.slot_mapping, common.block_size, backend.query.num_kv_heads)
        self._backend = backend
        self._common = common
        self._plans: dict[Features, StepPlan] = {}
        query = backend.query
        self.plan(Features(query.sliding_window, query.alibi, query.sinks))

    def plan(self, features: Features) -> StepPlan:
        """The plan for layers with these features."""
        found = self._plans.get(features)
        if found is None:
            found = self._plans[features] = self._backend.plan(self._common, features)
        return found


class TorchAttentionBackend(SplitAttentionBackend):
    """Scores, softmax and values as batched matrix products, with the query heads of one key head side by side.

    That needs no copies of keys and values per query head, and on a CPU it is faster than
    ``scaled_dot_product_attention`` in every shape measured but single short rows. float16 on a CPU computes in float32.
    What a cache of another type holds is widened when it is gathered; scales are met by queries and results.
    """

    name: ClassVar[str] = "torch"
    graph_support: ClassVar[GraphSupport] = "never"
    kv_layout: ClassVar[str] = KV_LAYOUT

    def __init__(self, query: AttentionQuery, device: torch.device | str | None = None) -> None:
        self.query = query
        self._device = torch.device(query.device if device is None else device)
        self._cache_dtype = _CACHE_DTYPES[query.kv_dtype]
        self._out_dtype = self._dtype = _DTYPES[query.dtype]
        if self._dtype == torch.float16 and self._device.type == "cpu":
            self._dtype = torch.float32
        self.limits = CPU if self._device.type == "cpu" else ACCELERATOR
        self._run_size = query.block_size * query.head_size
        self._workspace = Workspace(self._device)
        self._known: dict[str, tuple[AttentionLayer, Features, Constants]] = {}

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        return Support.of(
            None if query.device.split(":")[0] in _DEVICES else f"device {query.device!r} is none of {', '.join(_DEVICES)}",
            None if query.dtype in _DTYPES else f"dtype {query.dtype!r} is none of {', '.join(_DTYPES)}",
            None if query.kv_dtype in _CACHE_DTYPES else f"cache dtype {query.kv_dtype!r} is none of {', '.join(_CACHE_DTYPES)}",
            None
            if query.num_kv_heads > 0 and query.num_heads % query.num_kv_heads == 0
            else f"{query.num_heads} heads do not divide into {query.num_kv_heads} key heads",
        )

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    def build_metadata(self, common: CommonAttentionMetadata) -> TorchMetadata:
        return TorchMetadata(self, common)

    def plan(self, common: CommonAttentionMetadata, features: Features) -> StepPlan:
        """Sections of one step for layers with ``features``."""
        query = self.query
        shape = Shape(
            num_heads=query.num_heads,
            num_kv_heads=query.num_kv_heads,
            head_size=query.head_size,
            block_size=common.block_size,
            itemsize=self._dtype.itemsize,
            limits=self.limits,
        )
        context = StepContext(common.block_table, shape, self._workspace, self._dtype, self._cache_dtype, features)
        # Finding common prefixes needs the table on the host: on other devices that would wait for them.
        shareable = common.block_table.device.type == "cpu" and features.sliding_window is None and not features.alibi
        table = common.block_table.numpy() if shareable else None
        plan: list[Section | SharedSection] = []
        for rows in sections(RowSet.of(common.query_start_loc, common.seq_lens, common.block_size, features.sliding_window)):
            alone: RowSet | None = rows
            if table is not None:
                sets, alone = shared_sets(rows, table, shape)
                plan += [SharedSection(members, blocks, context) for members, blocks in sets]
            if alone is not None:
                plan.append(Section(alone, replace(context, dtype=self._section_dtype(alone, shape))))
        stagings = [staging for section in plan for staging in section.stagings]
        if all(staging.is_span for staging in stagings):
            return StepPlan(plan, None)
        return StepPlan(plan, Collector(stagings, common.num_tokens, self._workspace, self._out_dtype))

    def _section_dtype(self, rows: RowSet, shape: Shape) -> torch.dtype:
        keys = len(rows) * int(rows.num_blocks.max()) * shape.block_size
        small = rows.query_len[0] == 1 and keys <= shape.limits.float32_keys
        return torch.float32 if small else self._dtype

    def store(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TorchMetadata,
    ) -> None:
        key = to_stored(key, layer.key_scale, self._cache_dtype)
        value = to_stored(value, layer.value_scale, self._cache_dtype)
        write_tokens(key, value, kv_cache, metadata.rows)

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TorchMetadata,
        out: torch.Tensor,
    ) -> torch.Tensor:
        runs = movable(kv_cache).view(-1, self._run_size)
        features, constants = self._of_layer(layer)
        plan = metadata.plan(features)
        for section in plan.sections:
            section.run(query, runs, out, constants)
        if plan.collector is not None:
            plan.collector.store(out)
        return out

    def _of_layer(self, layer: AttentionLayer) -> tuple[Features, Constants]:
        """Made once for each layer object: short steps are over in some microseconds."""
        known = self._known.get(layer.name)
        if known is None or known[0] is not layer:
            known = self._known[layer.name] = layer, Features.of(layer), Constants.of(layer)
        return known[1:]
