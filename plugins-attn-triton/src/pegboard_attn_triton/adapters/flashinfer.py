"""FlashInfer (package ``flashinfer-python`` 0.2 and later) on the shared cache, which it calls layout HND.

Its wrappers plan a step on the host, for one scale, window and soft cap; the plan then serves all layers that have the same ones.
Steps whose rows all have one new token run the decode wrapper, others the one for prefill. Storing is this package's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from pegboard.contracts.attention import AttentionLayer, AttentionQuery, CommonAttentionMetadata, Support
from pegboard_attn_triton import support
from pegboard_attn_triton.backend import PagedBackend

DTYPES = ("bfloat16", "float16")
HEAD_SIZES = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
"""As FlashInfer recommends."""
Constants = tuple[float, int, float | None]
"""Scale, tokens before a query that it sees (-1: all), soft cap."""


@dataclass(slots=True, eq=False)
class InferMetadata:
    """One step as FlashInfer plans it: rows that have tokens. int32 on the host, except for ``indices``."""

    slots: torch.Tensor
    query_start: torch.Tensor
    """[B + 1] cumulated new tokens."""
    page_start: torch.Tensor
    """[B + 1] cumulated numbers of blocks."""
    indices: torch.Tensor
    """[blocks of all rows] block ids, on the device."""
    last_page: torch.Tensor
    """[B] tokens in each row's last block."""
    decode: bool


class FlashInferBackend(PagedBackend):
    """One wrapper per kind of step and set of constants; each plans a step when the first layer asks for it."""

    name: ClassVar[str] = "flashinfer"

    def __init__(self, query: AttentionQuery, device: torch.device | str | None = None) -> None:
        super().__init__(query, device)
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[bool, Constants], tuple[Any, InferMetadata]] = {}

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        narrow, size = query.kv_dtype == support.FLOAT8, query.head_size
        return Support.of(
            support.library_problem("flashinfer-python", (0, 2), "pip install flashinfer-python"),
            *support.kernel_problems(query),
            support.one_of("dtype", query.dtype, DTYPES),
            support.one_of("cache dtype", query.kv_dtype, (query.dtype, support.FLOAT8)),
            *support.shape_problems(query),
            None if size in HEAD_SIZES else f"head size {size} is none of {', '.join(map(str, HEAD_SIZES))}",
            "ALiBi slopes of the model's own are not supported" if query.alibi else None,
            "attention sinks are not supported" if query.sinks else None,
            "scales per head are not supported" if query.kv_scales == "head" else None,
            "scales are only supported of a float8 cache" if query.kv_scales == "tensor" and not narrow else None,
        )

    def build_metadata(self, common: CommonAttentionMetadata) -> InferMetadata:
        lengths = np.diff(common.query_start_loc)
        rows = np.flatnonzero(lengths)  # others have no tokens to compute, and pages must not be empty
        pages = -(-common.seq_lens[rows] // common.block_size)
        page_start = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        column = np.arange(page_start[-1]) - np.repeat(page_start[:-1], pages)
        width = common.block_table.shape[1]
        flat = _send(np.repeat(rows, pages) * width + column, self.device)
        return InferMetadata(
            slots=common.slot_mapping,
            query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[rows])]).astype(np.int32)),
            page_start=torch.from_numpy(page_start),
            indices=common.block_table.reshape(-1).index_select(0, flat),
            last_page=torch.from_numpy((common.seq_lens[rows] - (pages - 1) * common.block_size).astype(np.int32)),
            decode=bool((lengths[rows] == 1).all()),
        )

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: InferMetadata, out: torch.Tensor
    ) -> torch.Tensor:
        if len(query):
            wrapper = self._planned(layer, metadata)
            wrapper.run(query.contiguous(), kv_cache, k_scale=layer.key_scale, v_scale=layer.value_scale, out=out)
        return out

    def _planned(self, layer: AttentionLayer, metadata: InferMetadata) -> Any:
        """The wrapper for these constants, with this step planned."""
        window = -1 if layer.sliding_window is None else layer.sliding_window - 1
        constants = (layer.scale, window, layer.logits_soft_cap)
        wrapper, planned = self._wrappers.get((metadata.decode, constants), (None, None))
        if planned is metadata:
            return wrapper
        wrapper = wrapper or self._make(metadata.decode)
        self._plan(wrapper, metadata, constants)
        self._wrappers[metadata.decode, constants] = (wrapper, metadata)
        return wrapper

    def _make(self, decode: bool) -> Any:
        import flashinfer

        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        if decode:
            group = self.query.num_heads // self.query.num_kv_heads
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=group >= 4)
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _plan(self, wrapper: Any, metadata: InferMetadata, constants: Constants) -> None:
        q = self.query
        scale, window, soft_cap = constants
        shared = {
            "window_left": window,
            "logits_soft_cap": soft_cap,
            "sm_scale": scale,
            "q_data_type": getattr(torch, q.dtype),
            "kv_data_type": getattr(torch, q.kv_dtype),
        }
        pages = (metadata.page_start, metadata.indices, metadata.last_page)
        sizes = (q.num_heads, q.num_kv_heads, q.head_size, q.block_size)
        if metadata.decode:
            wrapper.plan(*pages, *sizes, **shared)
        else:
            wrapper.plan(metadata.query_start, *pages, *sizes, causal=True, **shared)


def _send(index: np.ndarray, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(index)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
