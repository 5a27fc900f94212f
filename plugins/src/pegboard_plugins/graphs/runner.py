"""DecodeGraphRunner: captured decode steps of several sizes."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pegboard.config import EngineConfig
from pegboard.contracts.attention import CommonAttentionMetadata
from pegboard.contracts.graph_runner import ForwardInputs, GraphReport, GraphRunner, GraphTarget
from pegboard.contracts.platform import DeviceGraph, DeviceGraphs, Platform
from pegboard_plugins.graphs.buffers import Hidden, InputBuffers, OutputBuffers
from pegboard_plugins.graphs.problems import graph_problems
from pegboard_plugins.graphs.sizes import capture_sizes

log = logging.getLogger(__name__)

_NOT_YET = GraphReport(off=("nothing has been captured",))
_MEASURED = 2
"""Graphs that are captured to find out how much memory all will take."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: DeviceGraph
    metadata: Sequence[Any]
    """Per attention group."""


class DecodeGraphRunner(GraphRunner):
    """Takes steps whose rows have one token each, on attention backends that can be captured for such steps, and pads them up to
    the next captured size. Other steps, and those with more rows than any graph, are not its business.

    Graphs are captured from the largest to the smallest, so that the small ones find memory in the pool that they all share.
    """

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        self._settings, self._platform = config.compilation, platform
        self._report = _NOT_YET
        self._target: GraphTarget
        self._inputs: InputBuffers
        self._outputs: OutputBuffers
        self._captured: dict[int, _Captured] = {}
        self._sizes: list[int] = []

    @property
    def report(self) -> GraphReport:
        return self._report

    def measure(self, target: GraphTarget) -> int:
        """Captures the two largest sizes: each further one takes as much as the second, or less."""
        sizes, pool = self._plan(target)
        if pool is None or self._problems(target, pool, sizes):
            return 0
        taken: list[int] = []
        try:
            self._make_room(target, sizes)
            for size in sizes[::-1][:_MEASURED]:
                self._capture(pool, size)
                taken.append(pool.num_bytes)
        finally:
            self.drop()
        return taken[-1] + (len(sizes) - len(taken)) * (taken[-1] - taken[0])

    def capture(self, target: GraphTarget) -> GraphReport:
        self.drop()
        begin = time.monotonic()
        sizes, pool = self._plan(target)
        problems = self._problems(target, pool, sizes)
        if problems:
            self._report = GraphReport(off=problems)
            log.info("no graphs: %s", "; ".join(problems))
            return self._report
        assert pool is not None, "a platform without graphs is a problem"
        try:
            self._make_room(target, sizes)
            for size in reversed(sizes):
                self._capture(pool, size)
        except BaseException:
            self.drop()
            raise
        self._sizes = sizes
        self._report = GraphReport(tuple(sizes), time.monotonic() - begin, pool.num_bytes)
        names = ", ".join(map(str, sizes))
        log.info("graphs of %s rows captured in %.1f s, %d bytes", names, self._report.seconds, self._report.num_bytes)
        return self._report

    def fits(self, attention: Sequence[CommonAttentionMetadata]) -> bool:
        step = attention[0]
        return bool(self._sizes) and step.num_rows <= self._sizes[-1] and bool((np.diff(step.query_start_loc) == 1).all())

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> Hidden:
        rows = inputs.attention[0].num_rows
        captured = self._captured[self._sizes[bisect_left(self._sizes, rows)]]
        for backend, metadata, common in zip(self._target.backends, captured.metadata, inputs.attention, strict=True):
            backend.refill(metadata, common)
        self._inputs.fill(inputs)
        captured.graph.replay()
        return self._outputs.rows(rows)

    def drop(self) -> None:
        if self._report.sizes:
            self._report = _NOT_YET
        self._captured, self._sizes = {}, []
        for name in ("_inputs", "_outputs", "_target"):
            if hasattr(self, name):
                delattr(self, name)

    def _plan(self, target: GraphTarget) -> tuple[list[int], DeviceGraphs | None]:
        return capture_sizes(self._settings.capture_sizes, target.max_rows), self._platform.make_graphs()

    def _problems(self, target: GraphTarget, pool: DeviceGraphs | None, sizes: list[int]) -> tuple[str, ...]:
        return tuple(graph_problems(self._settings, target, self._platform.name, pool, sizes))

    def _make_room(self, target: GraphTarget, sizes: list[int]) -> None:
        self._target = target
        with torch.inference_mode(False):  # like a real step's
            self._inputs, self._outputs = InputBuffers(target, sizes[-1]), OutputBuffers(sizes[-1])

    @torch.inference_mode()
    def _capture(self, pool: DeviceGraphs, size: int) -> None:
        """A graph of ``size`` rows, all of them padding, which stores nothing."""
        target, inputs = self._target, self._inputs.rows(size)
        blocks = zip(target.backends, target.max_blocks, strict=True)
        metadata = [backend.graph_metadata(size, most) for backend, most in blocks]
        try:
            graph = pool.capture(lambda: self._outputs.take(target.forward(inputs, metadata)))
        except RuntimeError as error:
            full = isinstance(error, torch.OutOfMemoryError)
            room = "a smaller KV cache (kv_cache.memory_fraction) leaves more memory, " if full else ""
            raise RuntimeError(
                f"a graph of {size} rows could not be captured: {error}; {room}compilation.enforce_eager=true does without graphs"
            ) from error
        self._captured[size] = _Captured(graph, metadata)
