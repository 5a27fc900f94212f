"""The standard graph runner, on a platform that records on the processor."""

from __future__ import annotations

import logging

import pytest
import torch

from pegboard.config import EngineConfig
from pegboard.contracts.platform import Platform
from pegboard.testing.conformance.graph_runner import GraphRunnerConformance
from pegboard.testing.graph_session import GraphSession
from pegboard.testing.recorded_graphs import RecordedGraph, RecordedGraphs, RecordingPlatform
from pegboard_plugins.graphs.runner import DecodeGraphRunner


class TestDecodeGraphRunner(GraphRunnerConformance):
    def make(self, config: EngineConfig, platform: Platform) -> DecodeGraphRunner:
        return DecodeGraphRunner(config, platform)


def test_the_next_size_is_replayed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pegboard_plugins.graphs")
    session = GraphSession(DecodeGraphRunner, RecordingPlatform(), capture_sizes=[5, 1, 3])
    runner, replayed = session.runner, []
    assert isinstance(runner, DecodeGraphRunner)
    report = runner.capture(session.target())
    assert f"graphs of 1, 3, 5 rows captured in {report.seconds:.1f} s, {report.num_bytes} bytes" in caplog.text
    size_of = {id(captured.graph): size for size, captured in runner._captured.items()}
    assert list(size_of.values()) == [5, 3, 1], "the largest comes first"
    replay = RecordedGraph.replay

    def noted(graph: RecordedGraph) -> None:
        replayed.append(size_of[id(graph)])
        replay(graph)

    monkeypatch.setattr(RecordedGraph, "replay", noted)
    for rows in range(1, 6):
        session.check([(name, 1) for name in "abcde"[:rows]])
    session.check([(name, 1) for name in "abcdef"], replayed=False)
    assert replayed == [1, 3, 3, 5, 5]


def test_all_graphs_share_a_pool() -> None:
    platform = RecordingPlatform()
    session = GraphSession(DecodeGraphRunner, platform)
    expected = session.runner.measure(session.target())
    report = session.runner.capture(session.target())
    measured, captured = platform.pools
    assert 0 < measured.num_bytes < captured.num_bytes == report.num_bytes
    assert report.num_bytes <= expected, "no graph takes more than the second largest, which was measured"


def test_a_capture_that_finds_no_memory_says_what_leaves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    session = GraphSession(DecodeGraphRunner, RecordingPlatform())
    monkeypatch.setattr(RecordedGraphs, "capture", full)
    remedy = r"a smaller KV cache \(kv_cache.memory_fraction\) leaves more memory, compilation.enforce_eager=true does without"
    for call in (session.runner.measure, session.runner.capture):
        with pytest.raises(RuntimeError, match=rf"a graph of 6 rows could not be captured: tried .*; {remedy}"):
            call(session.target())
        session.check([("a", 1)], replayed=False)
