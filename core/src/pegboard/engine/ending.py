"""Ending: what happens once when an engine core ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pegboard.contracts.executor import Executor
from pegboard.engine.info import EngineInfo

if TYPE_CHECKING:
    from pegboard.contracts.event_sink import EventSink
    from pegboard.engine.grammars import GrammarManager
    from pegboard.plugins import PluginHost

log = logging.getLogger(__name__)


class Ending:
    """Called once. Holds no reference to the core: it also runs when that is gone. What it ends is set as it is made."""

    def __init__(self, executor: Executor, host: PluginHost) -> None:
        self._executor, self._host = executor, host
        self.info: EngineInfo | None = None
        self.sinks: Mapping[str, EventSink] = {}
        self.grammars: GrammarManager | None = None

    def __call__(self) -> None:
        """Tell the plugins, close the event sinks, stop the threads of grammars and the workers. What one of them raises keeps no
        other from ending."""
        try:
            for record in self._host.records:
                if record.active and "engine_stopping" in record.hooks:
                    stopping = partial(self._host.only, record, "engine_stopping", info=self.info)
                    _attempt(stopping, f"engine_stopping of {record.label}")
            for name, sink in self.sinks.items():
                _attempt(sink.close, f"closing event sink {name!r}")
            if self.grammars is not None:
                _attempt(self.grammars.close, "ending the threads of grammars")
        finally:
            self._executor.shutdown()


def _attempt(end: Callable[[], object], doing: str) -> None:
    try:
        end()
    except Exception:
        log.warning("%s failed", doing, exc_info=True)
