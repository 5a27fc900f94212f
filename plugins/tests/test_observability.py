from __future__ import annotations

import logging

import pytest

from pegboard.contracts.event_sink import Event
from pegboard.contracts.stat_logger import IterationStats
from pegboard.wire import SchedulerStats
from pegboard_plugins.observability import LogEventSink, LogStatLogger


def test_stat_lines_give_rates_of_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pegboard_plugins.observability")
    now = 0.0
    logger = LogStatLogger(clock=lambda: now)
    stats = SchedulerStats(
        num_running=3, num_waiting=2, kv_usage=0.25, prefix_queries=10, prefix_hits=4, degraded=["queue x raised"]
    )
    for _ in range(4):
        logger.record(stats, IterationStats(num_prompt_tokens=10, num_generation_tokens=5, num_finished=1))
    now = 2.0
    logger.log()
    line, warning = (record.getMessage() for record in caplog.records)
    assert "20.0 prompt and 10.0 generated tokens/s, 4 finished; running 3, waiting 2" in line
    assert "KV cache 25.0% used, prefix hits 40%" in line
    assert warning == "degraded: queue x raised"
    caplog.clear()
    logger.record(SchedulerStats(), IterationStats())
    logger.log()
    assert caplog.records == [], "nothing happened"


def test_events_are_debug_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pegboard_plugins.observability")
    LogEventSink().emit(Event("preempted", "r1", 7, 0.0, {"blocks": 4}))
    assert [record.getMessage() for record in caplog.records] == ["step 7: preempted r1 blocks=4"]
