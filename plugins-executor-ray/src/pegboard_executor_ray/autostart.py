"""Ray starts a new cluster where a call finds that there is none: not for calls of ours, which are about the one there was."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Final, TypeVar

from ray._private import auto_init_hook

ThreadT = TypeVar("ThreadT", bound=threading.Thread)


class _Allowed:
    """In place of Ray's own switch, which it asks before it starts a cluster."""

    def __init__(self, before: object) -> None:
        self._before = before
        self._lock = threading.Lock()
        self._holders = 0
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return bool(self._before) and not self._holders and threading.current_thread() not in self._threads

    def hold(self, by: int) -> None:
        with self._lock:
            self._holders += by

    def leave_out(self, thread: threading.Thread) -> None:
        self._threads.add(thread)


_allowed: Final = _Allowed(getattr(auto_init_hook, "enable_auto_connect", True))
auto_init_hook.enable_auto_connect = _allowed  # type: ignore[assignment]


def hold() -> None:
    """Until ``release``, whoever calls Ray without a cluster gets an error instead of a new cluster."""
    _allowed.hold(1)


def release() -> None:
    _allowed.hold(-1)


@contextlib.contextmanager
def held() -> Iterator[None]:
    hold()
    try:
        yield
    finally:
        release()


def never_from(thread: ThreadT) -> ThreadT:
    """What ``thread`` asks of Ray starts no cluster, however long it lives. Returns ``thread``."""
    _allowed.leave_out(thread)
    return thread
