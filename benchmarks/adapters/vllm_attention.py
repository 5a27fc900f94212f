"""vLLM's paged attention for CPUs, for ``attention.py``: a case a line on standard input, timings a line on standard output.

Runs in vLLM's own Python. ``{"case": …}`` prepares and checks a case, ``{"seconds": s}`` times it, the end of the input ends it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from attention_shapes import Case, least_times, slots, tables
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

current_platform.import_kernels()
BLOCK = 128
"""vLLM's own choice on a CPU."""


class Peer:
    """One case: what ``CPUAttentionBackendImpl.forward`` calls, per layer."""

    def __init__(self, case: Case) -> None:
        self.heads, self.kv_heads, self.size = case.heads
        self.dtype = getattr(torch, case.dtype)
        self.isa = _get_attn_isa(self.dtype, BLOCK, self.size)
        self.table, count = tables(case, BLOCK)
        shape = (count, self.kv_heads, 2 * BLOCK, self.size)
        self.caches = [torch.zeros(shape, dtype=self.dtype) for _ in range(case.layers)]
        for cache in self.caches:  # the same numbers in every block: only where they lie matters
            cache[:] = torch.randn(shape[1:]).to(self.dtype)
        width = max(map(len, self.table))
        self.block_table = torch.tensor([row + [0] * (width - len(row)) for row in self.table], dtype=torch.int32)
        new = [count for _, count in case.rows]
        self.start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        self.lengths = torch.tensor([length for length, _ in case.rows], dtype=torch.int32)
        self.slots = torch.tensor(slots(case, self.table, BLOCK))
        fused = torch.randn(sum(new), self.heads + 2 * self.kv_heads, self.size).to(self.dtype)
        self.query, self.key, self.value = fused.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        self.out = torch.empty(sum(new), self.heads, self.size, dtype=self.dtype)
        self.plan(0)

    def plan(self, _: int) -> None:
        """Once per step."""
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.table),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.size,
            seq_lens=self.lengths,
            dtype=self.dtype,
            query_start_loc=self.start,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, where: torch.Tensor) -> None:
        keys, values = self.caches[layer].chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, where, self.isa)

    def run(self, layer: int) -> None:
        self.store(layer, self.key, self.value, self.slots)
        keys, values = self.caches[layer].chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=keys,
            value_cache=values,
            output=self.out,
            query_start_loc=self.start,
            seq_lens=self.lengths,
            scale=self.size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.block_table,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )

    def error(self) -> float:
        """Of the first row's last token, whose context is written anew: the greatest difference from plain attention."""
        length, new = int(self.lengths[0]), int(self.start[1])
        key, value = (torch.randn(length, self.kv_heads, self.size).to(self.dtype) for _ in range(2))
        self.store(0, key, value, torch.tensor([self.table[0][at // BLOCK] * BLOCK + at % BLOCK for at in range(length)]))
        key[length - new :], value[length - new :] = self.key[:new], self.value[:new]
        self.run(0)
        q = self.query[new - 1].float().view(self.kv_heads, -1, self.size)
        weights = torch.softmax(torch.einsum("hgd,lhd->hgl", q, key.float()) * self.size**-0.5, -1)
        expected = torch.einsum("hgl,lhd->hgd", weights, value.float()).flatten(0, 1)
        return float((self.out[new - 1].float() - expected).abs().max())


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers, sys.stdout = sys.stdout, sys.stderr  # the library's own output is not an answer
    peer: Peer | None = None
    layers = 0
    for line in sys.stdin:
        order = json.loads(line)
        if "case" in order:
            peer = None
            case = Case.from_json(order["case"])
            peer, layers = Peer(case), case.layers
            answer: object = {"error": peer.error(), "plan_us": least_times(peer.plan, 1, 0.05)[0]}
        else:
            assert peer is not None, "a case comes first"
            answer = least_times(peer.run, layers, order["seconds"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
