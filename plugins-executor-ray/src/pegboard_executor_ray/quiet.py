"""Keeps Ray from telling the end of our graphs as if it were trouble: with tracebacks, for actors that were killed before."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Final

log = logging.getLogger(__name__)

_RAYS: Final = logging.getLogger("ray.dag.compiled_dag_node")
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def here() -> None:
    """From now on, what Ray logs of graphs in this thread is told by our logger, for debugging."""
    thread(threading.current_thread())


def thread(which: threading.Thread | None) -> None:
    if which is not None:
        _threads.add(which)


def _told_by_others(record: logging.LogRecord) -> bool:
    if threading.current_thread() not in _threads:
        return True
    log.debug("Ray: %s", record.getMessage(), exc_info=record.exc_info)
    return False


_RAYS.addFilter(_told_by_others)
