"""How graphs are recorded on CUDA, on a stand-in for torch's side of it that fails as torch does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pegboard_plugins.graphs.cuda import CudaGraphs

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, *_: Any) -> None:
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)


class StandIn:
    """``free``: what the device says when asked, one after the other."""

    def __init__(self) -> None:
        self.main = Stream()
        self.current = self.main
        self.recording = False
        self.free = [100]
        self.replayed = 0

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph(self, graph: Any, pool: Any, stream: Stream, capture_error_mode: str) -> Any:
        outer = self

        class Recording:
            def __enter__(self) -> None:
                self.before, outer.current, outer.recording = outer.current, stream, True

            def __exit__(self, kind: Any, *_: Any) -> None:
                outer.recording = False
                if kind is not None:  # the stream stays
                    raise RuntimeError("operation failed due to a previous error during capture")
                outer.current = self.before

        return Recording()

    def replay(self) -> None:
        self.replayed += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    graph = type("CUDAGraph", (), {"replay": lambda _: made.replay()})
    parts: dict[str, Callable[..., Any]] = {
        "Stream": Stream,
        "stream": made.stream,
        "current_stream": lambda _: made.current,
        "CUDAGraph": graph,
        "graph": made.graph,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda _: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _: (made.free.pop(0) if len(made.free) > 1 else made.free[0], 100),
    }
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    return made


def test_a_function_is_warmed_up_then_recorded_on_a_stream_of_the_pool(cuda: StandIn) -> None:
    cuda.free = [70, 70, 40]
    calls: list[tuple[bool, Stream]] = []
    pool = CudaGraphs(DEVICE)
    assert pool.num_bytes == 0
    graph = pool.capture(lambda: calls.append((cuda.recording, cuda.current)))
    assert [recording for recording, _ in calls] == [False, False, True]
    [side] = {stream for _, stream in calls}
    assert side is not cuda.main
    assert side.waits_for == [cuda.main]
    assert cuda.main.waits_for == [side]
    assert pool.num_bytes == 30
    assert cuda.replayed == 0
    graph.replay()
    assert cuda.replayed == 1


def test_no_two_pools_share_a_stream(cuda: StandIn) -> None:
    seen: list[Stream] = []
    for pool in (CudaGraphs(DEVICE), CudaGraphs(DEVICE)):
        pool.capture(lambda: seen.append(cuda.current))
    assert len(set(seen)) == 2


@pytest.mark.parametrize("problem", [RuntimeError("cannot wait here"), KeyboardInterrupt()])
def test_what_fails_is_told_and_the_stream_is_left(cuda: StandIn, problem: BaseException) -> None:
    def failing() -> None:
        if cuda.recording:
            raise problem

    with pytest.raises(type(problem)) as caught:
        CudaGraphs(DEVICE).capture(failing)
    assert caught.value is problem
    assert cuda.current is cuda.main


def test_an_end_that_fails_by_itself_is_told(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def broken(*_: Any, **__: Any) -> Iterator[None]:
        yield
        raise RuntimeError("out of memory for the graph")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    with pytest.raises(RuntimeError, match="out of memory for the graph"):
        CudaGraphs(DEVICE).capture(lambda: None)
    assert cuda.current is cuda.main
