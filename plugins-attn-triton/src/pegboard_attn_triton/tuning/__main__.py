"""``python -m pegboard_attn_triton.tuning``: measure sizes for one shape on this machine's device, and keep them for engines."""

from __future__ import annotations

import argparse
import logging

import torch

from pegboard_attn_triton.tuning.cache import TuningCache
from pegboard_attn_triton.tuning.config import ITEM_SIZES, Problem
from pegboard_attn_triton.tuning.search import Bench, Load, candidates, tune
from pegboard_attn_triton.tuning.table import shared_memory


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pegboard_attn_triton.tuning", description=__doc__)
    parser.add_argument("--heads", type=int, required=True, help="query heads of a layer (of one rank)")
    parser.add_argument("--kv-heads", type=int, required=True, help="key heads of a layer (of one rank)")
    parser.add_argument("--head-size", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--kv-dtype", default=None, choices=list(ITEM_SIZES), help="default: dtype")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32, help="rows of a decode step")
    parser.add_argument("--context", type=int, default=4096, help="tokens per row")
    parser.add_argument("--chunk", type=int, default=512, help="new tokens per row of a prefill step, which has four rows")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not torch.cuda.is_available():
        parser.exit(1, "there is no CUDA device to measure on\n")
    device = torch.device("cuda", torch.cuda.current_device())
    cache = TuningCache.of_device(torch.cuda.get_device_name(device))
    limit = shared_memory(torch.cuda.get_device_capability(device))
    for kernel, batch in (("decode", options.batch), ("prefill", 4)):
        problem = Problem(
            kernel,
            options.head_size,
            options.heads // options.kv_heads,
            options.dtype,
            options.kv_dtype or options.dtype,
            options.block_size,
        )
        bench = Bench(problem, options.kv_heads, Load(batch, options.context, options.chunk), device)
        cache.put(problem, tune(problem, candidates(problem, limit), bench))
    print(f"kept in {cache.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
