"""StatLogger: gets the engine's gauges and counters."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Final

from pegboard.wire import SchedulerStats

API: Final = 1


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One engine step as the front end saw it; seconds and tokens."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: int = 0
    time_to_first_token: tuple[float, ...] = ()
    inter_token_latency: tuple[float, ...] = ()


class StatLogger(abc.ABC):
    """Constructed with ``config``. Same rules as an ``EventSink``: an observer that must not block."""

    @abc.abstractmethod
    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None: ...

    def log(self) -> None:
        """Called every ``log_interval`` seconds."""
