"""Ctrl-C between steps instead of inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptGuard:
    """While it is entered, the first SIGINT only sets ``interrupted``: the loop looks at it between steps, so that an engine
    is never cut in the middle of one. A second SIGINT raises ``KeyboardInterrupt`` at once.

    Does nothing outside the main thread, or where somebody else handles SIGINT.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._active = False

    def __enter__(self) -> InterruptGuard:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._active = True
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._active = False

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if there was a SIGINT."""
        if self.interrupted:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            signal.default_int_handler(number, frame)
        self.interrupted = True
