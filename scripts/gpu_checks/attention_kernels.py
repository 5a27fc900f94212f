"""Every kernel against plain attention in float64: types, shapes, features, moved blocks, and replays of a captured graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gpu_checks.report import Check
from pegboard.contracts.attention import AttentionQuery
from pegboard.testing.attention_session import AttentionSession
from pegboard.testing.reference_attention import to_stored
from pegboard_attn_triton import launch
from pegboard_attn_triton.backend import TritonAttentionBackend
from pegboard_attn_triton.layout import kv_cache_shape

GEOMETRIES = {"9/3x64": (9, 3, 64, 16), "32/8x128": (32, 8, 128, 16), "8/1x256": (8, 1, 256, 32), "6/2x80": (6, 2, 80, 64)}
TYPES = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "int8"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, cap": {"sliding_window": 40, "logits_soft_cap": 8.0},
    "alibi, sinks": {"alibi": True, "sinks": True},
    "scales by head": {"kv_scales": "head"},
}


def run(device: torch.device) -> Iterator[Check]:
    """Two of the features for each shape and type, in turn: each combination is a kernel to compile."""
    names = list(FEATURES)
    for i, geometry in enumerate(GEOMETRIES):
        for j, types in enumerate(TYPES):
            for name in (names[(i + j) % 4], names[(i + j + 1 + j % 2) % 4]):
                made = partial(mixed_steps, device, geometry, types, FEATURES[name])
                yield _guarded(f"{geometry} {types[0]}, cache {types[1]}, {name}", made)
    yield _guarded("long contexts in splits", partial(long_contexts, device))
    yield _guarded("stored bits of int8 and float8", partial(stored_bits, device))
    yield _guarded("blocks copied, and swapped with pinned memory", partial(moved_blocks, device))
    yield _guarded("a captured graph, replayed with other contents", partial(replayed_graph, device))


def _guarded(name: str, check: Callable[[], float]) -> Check:
    try:
        return Check(name, True, f"largest error {check():.1e}")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Check(name, False, f"{type(error).__name__}: {lines[-1][:150]}")


def query_of(device: torch.device, geometry: str, types: tuple[str, str], changes: dict[str, Any]) -> AttentionQuery:
    heads, kv_heads, size, block = GEOMETRIES[geometry]
    query = dataclasses.replace(AttentionQuery(device.type, *types, heads, kv_heads, size, block), **changes)
    support = TritonAttentionBackend.supports(query)
    if not support.ok:
        raise ValueError("; ".join(support.reasons))
    return query


def _step(session: AttentionSession, new: list[tuple[str, int]]) -> float:
    step = session.prepare(new)
    return _error(session, session.run(step), step.expected)


def _error(session: AttentionSession, out: torch.Tensor, expected: torch.Tensor) -> float:
    session.compare(out, expected)
    return float((out.cpu().double() - expected).abs().max()) if len(out) else 0.0


def mixed_steps(device: torch.device, geometry: str, types: tuple[str, str], changes: dict[str, Any]) -> float:
    """Prompts, chunks after a prefix, decode rows and an empty row, mixed."""
    session = AttentionSession(TritonAttentionBackend, query_of(device, geometry, types, changes), num_blocks=40)
    first = _step(session, [("a", 5), ("b", 1), ("c", 75)])
    second = _step(session, [("a", 1), ("pad", 0), ("d", 33), ("c", 9), ("b", 1)])
    return max(first, second, _step(session, [("d", 1), ("a", 1), ("b", 1), ("c", 1)]))


def long_contexts(device: torch.device) -> float:
    """One long row, computed in chunks, then read in splits beside a short one."""
    changes = {"num_heads": 2, "head_size": 64, "block_size": 16}
    query = query_of(device, "8/1x256", ("bfloat16", "bfloat16"), changes)
    session = AttentionSession(TritonAttentionBackend, query, num_blocks=500)
    prefill = max(_step(session, [("long", count)]) for count in (700, 1500, 3))
    session.check([("short", 5)])
    step = session.prepare([("short", 1), ("long", 1)])
    metadata = session.backend.build_metadata(step.common)
    if metadata.num_splits < 2:
        raise AssertionError("the context was not split")
    return max(prefill, _error(session, session.run(step, metadata=metadata), step.expected))


def stored_bits(device: torch.device) -> float:
    """Bit by bit as torch converts."""
    heads, size, block = 3, 80, 16
    values = (torch.randn(200, heads, size) * 10.0 ** torch.empty(200, heads, size).uniform_(-4, 3)).to(device)
    scale = torch.tensor([0.037, 1.3, 0.71], device=device)
    session = AttentionSession(TritonAttentionBackend, query_of(device, "6/2x80", ("float32", "int8"), {}))
    layer = dataclasses.replace(session.layer, num_heads=heads, num_kv_heads=heads, key_scale=scale, value_scale=0.3)
    slots = torch.randperm(400)[: len(values)].to(device)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        cache = torch.zeros(kv_cache_shape(25, block, heads, size), dtype=torch.uint8, device=device).view(dtype)
        launch.store(layer, values, -values, cache, slots).run()
        kept = cache.view(torch.uint8)[slots // block, :, :, slots % block]
        for part, (given, by) in enumerate(((values, scale), (-values, 0.3))):
            if not torch.equal(kept[:, part], to_stored(given, by, dtype).view(torch.uint8)):
                raise AssertionError(f"{dtype} differs from torch's conversion")
    return 0.0


def moved_blocks(device: torch.device) -> float:
    """Within the cache, also where two change places; to pinned memory and back."""
    shape = kv_cache_shape(64, 16, 8, 128)
    cache = torch.randn(shape, device=device).to(torch.bfloat16)
    original, host = cache.clone(), torch.zeros(shape, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    move = TritonAttentionBackend.move_blocks
    move(cache, cache, torch.tensor([[0, 40], [1, 41], [2, 42]]))
    move(cache, cache, torch.tensor([[3, 4], [4, 3]]))
    move(cache, host, torch.tensor([[5, 9], [6, 8], [63, 0]]))
    cache[5:7].zero_()
    move(host, cache, torch.tensor([[9, 50], [8, 51], [0, 52]]))
    for place, source in {40: 0, 41: 1, 42: 2, 4: 3, 3: 4, 50: 5, 51: 6, 52: 63}.items():
        if not torch.equal(cache[place], original[source]):
            raise AssertionError(f"block {source} has not arrived at {place}")
    return 0.0


def replayed_graph(device: torch.device) -> float:
    """Captured on padding, replayed on steps of other rows, lengths and blocks."""
    rows = 8
    query = query_of(device, "32/8x128", ("bfloat16", "bfloat16"), {})
    session = AttentionSession(TritonAttentionBackend, query, num_blocks=60)
    session.check([(name, count) for name, count in zip("abcdef", (5, 90, 33, 1, 17, 64), strict=True)])
    backend = session.backend
    metadata = backend.graph_metadata(rows, 64)
    fused = session.draw(rows, query.num_heads + 2 * query.num_kv_heads, query.head_size)
    parts = fused.split([query.num_heads, query.num_kv_heads, query.num_kv_heads], dim=1)
    out = torch.empty_like(parts[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles the kernels, which cannot be done while capturing
        backend.forward(session.layer, *parts, session.caches[0], metadata, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(session.layer, *parts, session.caches[0], metadata, out)
    worst = 0.0
    for names in ("abc", "fedcba", "b", "ca"):
        step = session.prepare([(name, 1) for name in names])
        for part, given in zip(parts, (step.query, step.key, step.value), strict=True):
            part[: len(names)].copy_(given)
        backend.refill(metadata, step.common)
        graph.replay()
        worst = max(worst, _error(session, out[: len(names)], step.expected))
    return worst
