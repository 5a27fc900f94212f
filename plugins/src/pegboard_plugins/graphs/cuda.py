"""CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pegboard.contracts.platform import DeviceGraph, DeviceGraphs

_WARM_UPS = 2
"""The first call compiles and initialises; the second shows the allocator what a call needs once that is done."""


class CudaGraph(DeviceGraph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs(DeviceGraphs):
    """Recorded on a stream of its own, as CUDA demands; what other threads of the process do on the device meanwhile is allowed
    and not recorded. No two pools share a stream: torch keeps a workspace for cuBLAS per stream, which graphs use, and frees it
    with any graph that was recorded on that stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._before = self._in_use()

    def capture(self, function: Callable[[], None]) -> CudaGraph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # comes to its end also where torch.cuda.graph does not
            for _ in range(_WARM_UPS):
                function()
            self._record(graph, function)
        current.wait_stream(self._stream)
        return CudaGraph(graph)

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        problems: list[BaseException] = []
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    function()
                except BaseException as error:
                    problems.append(error)
                    raise
        except RuntimeError as error:
            if not problems or error is problems[0]:
                raise
            raise problems[0] from None  # a recording that was broken off cannot be ended, and that error says nothing of why

    @property
    def num_bytes(self) -> int:
        """By how much the device's memory in use has risen since there was nothing: the pool, what the driver keeps of each
        graph, and tensors that were made meanwhile, which are those that graphs read and write."""
        return max(0, self._in_use() - self._before)

    def _in_use(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
