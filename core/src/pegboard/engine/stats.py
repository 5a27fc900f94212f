"""Counting what happens, and feeding the stat loggers that the configuration names."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pegboard.contracts.stat_logger import IterationStats, StatLogger
from pegboard.wire import SchedulerStats

log = logging.getLogger(__name__)

MAX_FAILURES: Final = 10
"""Failures after which a stat logger is switched off."""


@dataclass(slots=True)
class IterationCounter:
    """One step as the front end sees it; prompt tokens count when a request gives its first token."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: int = 0
    time_to_first_token: list[float] = field(default_factory=list)
    inter_token_latency: list[float] = field(default_factory=list)

    def frozen(self) -> IterationStats:
        return IterationStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_finished=self.num_finished,
            time_to_first_token=tuple(self.time_to_first_token),
            inter_token_latency=tuple(self.inter_token_latency),
        )


class StatLoggers:
    """The stat loggers of one front end. What they raise never reaches a caller: it is logged, and ends them in the end."""

    def __init__(self, loggers: Mapping[str, StatLogger], interval: float) -> None:
        """``loggers``: by name. ``interval``: seconds between calls of ``log``."""
        self._loggers = dict(loggers)
        self._failures = dict.fromkeys(self._loggers, 0)
        self._interval = interval
        self._next_log = time.monotonic() + interval

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def record(self, scheduler: SchedulerStats, counter: IterationCounter) -> None:
        """Hand one step to every logger, and have them write when the interval is over."""
        iteration = counter.frozen()
        due = time.monotonic() >= self._next_log
        if due:
            self._next_log = time.monotonic() + self._interval
        for name, logger in list(self._loggers.items()):
            try:
                logger.record(scheduler, iteration)
                if due:
                    logger.log()
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._failures[name] += 1
        if self._failures[name] == 1:
            log.warning("stat logger %r raised; later failures are only counted", name, exc_info=error)
        if self._failures[name] >= MAX_FAILURES:
            log.warning("stat logger %r is switched off after %d failures", name, MAX_FAILURES)
            del self._loggers[name]
