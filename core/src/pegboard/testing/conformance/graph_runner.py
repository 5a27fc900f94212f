"""What every graph runner must keep. Subclass ``GraphRunnerConformance``, give ``make``.

By default on a platform that records on the processor and compares what it replays; with ``platform`` on a real one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.graph_runner import GraphRunner
from pegboard.contracts.platform import Platform
from pegboard.testing.graph_session import GraphSession
from pegboard.testing.recorded_graphs import RecordingPlatform

NAMES = "abcdef"


class WithoutGraphs(RecordingPlatform):
    def make_graphs(self) -> Any:
        return None


class GraphRunnerConformance:
    """What is replayed must be right. ``replays``: whether steps of one token per row are."""

    platform: ClassVar[type[Platform]] = RecordingPlatform
    replays: ClassVar[bool] = True

    def make(self, config: EngineConfig, platform: Platform) -> GraphRunner:
        raise TypeError(f"{type(self).__name__} must define make(config, platform)")

    def session(self, **settings: Any) -> GraphSession:
        return GraphSession(self.make, self.platform(), **settings)

    @pytest.mark.parametrize("place", ["only", "first", "middle", "last"])
    def test_steps_of_every_size(self, place: str) -> None:
        session = self.session(is_first=place in ("only", "first"), is_last=place in ("only", "last"))
        session.runner.capture(session.target())
        session.check([(name, 3 + i) for i, name in enumerate(NAMES)], replayed=False)
        for rows in (1, 6, 2, 5, 3, 4, 1):
            session.check([(name, 1) for name in NAMES[:rows]], self.replays)

    def test_rows_come_in_any_order_and_grow(self) -> None:
        session = self.session()
        session.runner.capture(session.target())
        session.check([("a", 9), ("b", 2)], replayed=False)
        for names in ("ab", "ba", "b", "acb", "dbca", "c") * 3:
            session.check([(name, 1) for name in names], self.replays)

    def test_prompt_lengths_are_handed_on(self) -> None:
        session = self.session(with_prompt_lens=True)
        session.runner.capture(session.target())
        session.check([("a", 3), ("b", 4)], replayed=False)
        session.check([("b", 1), ("a", 1)], self.replays)

    def test_a_graph_is_not_replayed_on_what_it_was_not_captured_for(self) -> None:
        session = self.session(capture_sizes=[2])
        session.runner.capture(session.target())
        session.check([("a", 2)], replayed=False)
        session.check([("a", 1), ("b", 2)], replayed=False)
        session.check([("a", 0), ("b", 2)], replayed=False)
        session.check([("a", 1), ("b", 1), ("c", 1)], replayed=False)

    def test_nothing_is_captured_before_and_kept_after(self) -> None:
        session = self.session()
        assert session.runner.report.off
        session.check([("a", 3)], replayed=False)
        session.runner.drop()
        report = session.runner.capture(session.target())
        assert session.runner.report == report
        assert bool(report.sizes) == (not report.off) == self.replays
        session.check([("a", 1)], self.replays)
        session.runner.drop()
        assert session.runner.report.off
        session.check([("a", 1)], replayed=False)

    def test_it_is_captured_anew_for_other_caches(self) -> None:
        session = self.session()
        session.runner.capture(session.target())
        session.check([("a", 1)], self.replays)
        session.runner.drop()
        session.make_caches()
        session.runner.capture(session.target())
        session.check([("b", 5)], replayed=False)
        session.check([("b", 1), ("c", 1)], self.replays)

    def test_measuring_keeps_nothing(self) -> None:
        session = self.session()
        taken = session.runner.measure(session.target())
        assert (taken > 0) == self.replays
        session.check([("a", 1)], replayed=False)
        assert session.runner.report.off

    def test_it_says_why_there_are_no_graphs(self) -> None:
        for change in ("model", "backend", "platform"):
            session = self.session() if change != "platform" else GraphSession(self.make, WithoutGraphs())
            if change == "model":
                session.model.capturable = False
            if change == "backend":
                for backend in session.backends:
                    backend.graph_support = "never"  # type: ignore[misc]
            target = session.target()
            assert session.runner.measure(target) == 0
            report = session.runner.capture(target)
            assert not report.sizes
            assert report.off
            session.check([("a", 1)], replayed=False)

    def test_padding_stores_nothing(self) -> None:
        session = self.session(capture_sizes=[4])
        before = {name: cache.clone() for name, cache in session.caches.items()}
        session.runner.capture(session.target())
        assert all(cache.equal(before[name]) for name, cache in session.caches.items()), "captured on padding"

    def test_targets_are_told_apart_by_their_rows(self) -> None:
        """A runner must not take more rows than the target says: a graph of them may not fit."""
        session = self.session(max_rows=6)
        report = session.runner.capture(dataclasses.replace(session.target(), max_rows=3))
        assert all(size <= 3 for size in report.sizes)
        session.check([(name, 1) for name in NAMES[:4]], replayed=False)
