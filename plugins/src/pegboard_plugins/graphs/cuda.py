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
    and not recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._before = self._in_use()

    def capture(self, function: Callable[[], None]) -> CudaGraph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return CudaGraph(graph)

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
