"""Observers that write to the log: one line of statistics per interval, one debug line per event."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pegboard.contracts.event_sink import Event, EventSink
from pegboard.contracts.stat_logger import IterationStats, StatLogger
from pegboard.wire import SchedulerStats

log = logging.getLogger(__name__)


class LogStatLogger(StatLogger):
    """Token rates since the last line, and the scheduler's latest gauges. Silent while nothing happens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest = SchedulerStats()
        self._begin = clock()
        self._prompt_tokens = self._generated_tokens = self._finished = 0

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        self._latest = scheduler
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generated_tokens += iteration.num_generation_tokens
        self._finished += iteration.num_finished

    def log(self) -> None:
        now, stats = self._clock(), self._latest
        seconds = max(now - self._begin, 1e-9)
        if self._prompt_tokens or self._generated_tokens or self._finished or stats.num_running or stats.num_waiting:
            hits = f"{stats.prefix_hits / stats.prefix_queries:.0%}" if stats.prefix_queries else "none asked"
            log.info(
                "%.1f prompt and %.1f generated tokens/s, %d finished; running %d, waiting %d, swapped %d; "
                "KV cache %.1f%% used, prefix hits %s; preemptions %d",
                self._prompt_tokens / seconds,
                self._generated_tokens / seconds,
                self._finished,
                stats.num_running,
                stats.num_waiting,
                stats.num_swapped,
                100 * stats.kv_usage,
                hits,
                stats.num_preemptions,
            )
            for reason in stats.degraded:
                log.warning("degraded: %s", reason)
        self._begin = now
        self._prompt_tokens = self._generated_tokens = self._finished = 0


class LogEventSink(EventSink):
    """Every event as one debug line."""

    def emit(self, event: Event) -> None:
        data = " ".join(f"{key}={value}" for key, value in event.data.items())
        log.debug("step %d: %s %s %s", event.step, event.kind, event.request_id, data)
