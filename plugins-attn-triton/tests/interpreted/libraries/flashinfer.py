"""Stands in for FlashInfer: its two wrappers for paged caches, with their rules."""

from __future__ import annotations

import torch
from paged import attention, check, gather

calls: list[str] = []


class _Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def _keep(self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **constants):
        rows = len(last_page_len)
        check(qo_indptr, torch.int32, rows + 1)
        check(indptr, torch.int32, rows + 1)
        check(indices, torch.int32, int(indptr[-1]))
        check(last_page_len, torch.int32, rows)
        assert (last_page_len >= 1).all()
        assert (last_page_len <= page_size).all()
        assert (indptr.diff() >= 1).all()
        self.rows, self.sizes, self.constants = rows, (num_qo_heads, num_kv_heads, head_dim, page_size), constants
        self.qo_indptr, self.indptr, self.indices, self.last = qo_indptr, indptr, indices, last_page_len

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None):
        heads, kv_heads, size, page = self.sizes
        constants = self.constants
        check(q, constants["q_data_type"], int(self.qo_indptr[-1]), heads, size)
        check(paged_kv_cache, constants["kv_data_type"], len(paged_kv_cache), 2, kv_heads, page, size)
        calls.append(type(self).__name__)
        keys, values = paged_kv_cache.transpose(2, 3).unbind(1)
        for row in range(self.rows):
            ids = self.indices[int(self.indptr[row]) : int(self.indptr[row + 1])]
            length = (len(ids) - 1) * page + int(self.last[row])
            begin, end = int(self.qo_indptr[row]), int(self.qo_indptr[row + 1])
            own = [gather(pages.float(), ids, length) for pages in (keys, values)]
            out[begin:end] = attention(
                q[begin:end], own[0] * (k_scale or 1.0), own[1] * (v_scale or 1.0),
                scale=constants["sm_scale"], window_left=constants["window_left"], soft_cap=constants["logits_soft_cap"] or 0.0,
            )  # fmt: skip
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
        logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        calls.append("plan decode")
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._keep(
            one_each, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left=window_left,
            logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale,
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, *, causal=False, window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        calls.append("plan prefill")
        assert causal
        self._keep(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
            page_size, window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
            kv_data_type=kv_data_type, sm_scale=sm_scale,
        )  # fmt: skip
