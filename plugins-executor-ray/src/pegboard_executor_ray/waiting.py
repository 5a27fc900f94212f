"""Waiting for Ray, from outside, so that it may be shut down meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray
import ray._private.worker as _worker

_LOOK_SECONDS: Final = 0.02
_SHUTDOWN_SECONDS: Final = 30.0
asking: Final = threading.RLock()
"""Held while Ray is asked something that it answers at once; ``ray.shutdown`` waits for it."""
_disconnect: Final[Callable[..., None]] = _worker.disconnect


def wait(refs: Sequence[Any], seconds: float, needed: int | None = None) -> tuple[list[Any], list[Any]]:
    """As ``ray.wait``: those that are ready and those that are not, when ``needed`` of them are (all by default), or ``seconds``
    have passed.

    Ray is only asked, again and again: whoever waits inside of it while another thread shuts it down is stuck there for good,
    whatever the time-out, or takes the process along. Raises ``RaySystemError`` where it has been shut down.
    """
    end = time.monotonic() + seconds
    refs, count = list(refs), len(refs) if needed is None else needed
    while True:
        with asking:
            done, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
        left = end - time.monotonic()
        if len(done) >= count or left <= 0:
            return done, waiting
        time.sleep(min(left, _LOOK_SECONDS))


def let_shutdown_end() -> None:
    """Return when no ``ray.shutdown`` is under way in another thread, or after ``_SHUTDOWN_SECONDS``.

    References to objects and actors that are dropped in the middle of it end the process, without a word.
    """
    end = time.monotonic() + _SHUTDOWN_SECONDS
    while hasattr(_worker.global_worker, "core_worker") and not ray.is_initialized() and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _disconnect_between_questions(*args: Any, **kwargs: Any) -> None:
    """That part of ``ray.shutdown`` after which a question that is on its way would end the process."""
    with asking:
        _disconnect(*args, **kwargs)


_worker.disconnect = _disconnect_between_questions
