"""TritonAttentionBackend: paged attention with this package's kernels.

Whatever needs triton is imported when a kernel runs, so that ``supports`` can say that it is missing.
"""

from __future__ import annotations

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
from pegboard_attn_triton import layout, steps, support
from pegboard_attn_triton.device import processors
from pegboard_attn_triton.steps import StepMetadata
from pegboard_attn_triton.tuning.choice import choose_config
from pegboard_attn_triton.tuning.config import SMALLEST_TILE, Problem, group_pad
from pegboard_attn_triton.tuning.table import lookup

DTYPES = ("float32", "bfloat16", "float16")
STORED = ("int8", support.FLOAT8)
MOST_GROUP = 128


class PagedBackend(SplitAttentionBackend):
    """What the backends of this package share: the cache, storing, and moving blocks.

    Metadata of subclasses has ``slots``, where this step's tokens go.
    """

    kv_layout: ClassVar[str] = layout.KV_LAYOUT

    def __init__(self, query: AttentionQuery, device: torch.device | str | None = None) -> None:
        self.query = query
        self.device = torch.device(query.device if device is None else device)

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return layout.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def move_blocks(cls, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        from pegboard_attn_triton import blocks

        if not blocks.move(source, target, pairs):
            super().move_blocks(source, target, pairs)

    def store(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: StepMetadata
    ) -> None:
        from pegboard_attn_triton import launch

        launch.store(layer, key, value, kv_cache, metadata.slots).run()


class TritonAttentionBackend(PagedBackend):
    """Rows with one new token read their context in splits (``kernels/decode.py``), other rows in tiles of queries
    (``kernels/prefill.py``); scores and sums are float32, float32 inputs are multiplied without rounding.

    In how many splits a row is read depends on how many rows there are, so its result may differ in the last bits between steps.
    """

    name: ClassVar[str] = "triton"
    graph_support: ClassVar[GraphSupport] = "decode_only"

    def __init__(self, query: AttentionQuery, device: torch.device | str | None = None) -> None:
        super().__init__(query, device)
        self.decode_config = choose_config(problem_of(query, "decode"), self.device)
        self.prefill_config = choose_config(problem_of(query, "prefill"), self.device)
        self.processors = processors(self.device)
        # the interpreter computes no bfloat16
        self._upcast = query.dtype == "float32" or (self.device.type == "cpu" and query.dtype == "bfloat16")

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        group = query.num_heads // max(query.num_kv_heads, 1)
        found = Support.of(
            *support.kernel_problems(query),
            support.one_of("dtype", query.dtype, DTYPES),
            support.one_of("cache dtype", query.kv_dtype, (*dict.fromkeys((query.dtype, *STORED)),)),
            *support.shape_problems(query),
            None if group <= MOST_GROUP else f"{group} heads per key head are more than {MOST_GROUP}",
        )
        return Support.of(_shared_memory_problem(query)) if found.ok else found

    def build_metadata(self, common: CommonAttentionMetadata) -> StepMetadata:
        block_m = self._block_m(common)
        plan = steps.plan_step(common.query_start_loc, common.seq_lens, block_m // self._group)
        longest = int(common.seq_lens[plan.decode_rows].max(initial=0))
        splits = self._splits(len(plan.decode_rows), longest)
        return steps.step_metadata(common, plan, splits, block_m, self.device)

    def graph_metadata(self, num_rows: int, max_blocks: int) -> StepMetadata:
        splits = self._splits(num_rows, max_blocks * self.query.block_size)
        return steps.persistent_metadata(num_rows, max_blocks, splits, self.device)

    def refill(self, metadata: StepMetadata, common: CommonAttentionMetadata) -> None:
        steps.refill(metadata, common)

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: StepMetadata, out: torch.Tensor
    ) -> torch.Tensor:
        from pegboard_attn_triton import launch

        if layer.num_heads * self.query.num_kv_heads != self.query.num_heads * layer.num_kv_heads:
            raise ValueError(
                f"{layer.name} has {layer.num_heads} heads on {layer.num_kv_heads} key heads, and this backend was made for "
                f"{self.query.num_heads} on {self.query.num_kv_heads}: layers of one group must share key heads alike"
            )
        if len(metadata.tile_rows):
            launch.prefill(layer, query, kv_cache, metadata, out, self.prefill_config, self._upcast).run()
        if len(metadata.decode_rows):
            for each in launch.decode(layer, query, kv_cache, metadata, out, self.decode_config, self._upcast):
                each.run()
        return out

    @property
    def _group(self) -> int:
        return self.query.num_heads // self.query.num_kv_heads

    def _block_m(self, common: CommonAttentionMetadata) -> int:
        """Queries per tile: no more than the longest row fills, so that short chunks waste nothing."""
        longest = int((common.query_start_loc[1:] - common.query_start_loc[:-1]).max(initial=1))
        filled = max(1 << (longest * self._group - 1).bit_length(), group_pad(self._group), SMALLEST_TILE)
        return max(min(self.prefill_config.block_m, filled), group_pad(self._group))

    def _splits(self, num_rows: int, longest: int) -> int:
        longest = min(longest, self.query.sliding_window or longest)
        return steps.choose_splits(num_rows, self.query.num_kv_heads, longest, self.decode_config.block_n, self.processors)


def problem_of(query: AttentionQuery, kernel: str) -> Problem:
    """What the best sizes of a kernel depend on."""
    group = query.num_heads // query.num_kv_heads
    return Problem(kernel, query.head_size, group, query.dtype, query.kv_dtype, query.block_size)


def _shared_memory_problem(query: AttentionQuery) -> str | None:
    """Why no tiles fit the device's shared memory (many wide heads in float32), or None."""
    found = support.device.capability()
    if not query.device.startswith("cuda") or found is None:
        return None
    try:
        for kernel in ("decode", "prefill"):
            lookup(problem_of(query, kernel), found)
    except ValueError as error:
        return str(error)
    return None
