"""What a process of this package sets up for itself: its name, its death, where its output and its log go."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def set_title(name: str, title: str) -> None:
    """``name``: up to 15 characters, what ``top`` shows; ``title`` replaces the command line where setproctitle is installed."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle  # type: ignore[import-not-found,unused-ignore]

        setproctitle(title)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, ends, however that may be and whatever this one does
    then. Only for a parent with one thread: the kernel goes by the thread that started us."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def _prctl(option: int, argument: Any) -> None:
    with contextlib.suppress(AttributeError, OSError):
        unused = ctypes.c_ulong(0)
        ctypes.CDLL(None).prctl(option, argument, unused, unused, unused)


def open_standard_descriptors() -> None:
    """Where 0, 1 or 2 are closed, as daemons leave them, open them on ``/dev/null``: else the next pipe or socket would get the
    number, and then whatever a library prints."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)


def send_output_to_stderr(prefix: str) -> None:
    """Lines that this process prints, to either stream, go to stderr with ``prefix``: stdout belongs to the program that runs
    the engine. Native code that prints lacks the prefix. Crashes and SIGTERM show where each thread was."""
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    stream = io.TextIOWrapper(io.BufferedWriter(_Lines(prefix)), encoding="utf-8", errors="backslashreplace", line_buffering=True)
    sys.stdout = sys.stderr = stream
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable(2)


class _Lines(io.RawIOBase):
    """Puts a prefix before every line and writes whole lines, each at once, so that those of several processes do not mix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, data: Any) -> int:
        piece = bytes(data)
        with self._lock:
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._put(lines)
        return len(piece)

    def close(self) -> None:
        with self._lock:
            rest, self._rest = self._rest, b""
            self._put([rest] if rest else [])
        super().close()

    def _put(self, lines: list[bytes]) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            for line in lines:
                os.write(2, self._prefix + line + b"\n")


def log_levels() -> dict[str, int]:
    """Of the root logger ("") and of every logger that has one of its own, for another process."""
    manager = logging.Logger.manager
    named = {name: logger.level for name, logger in manager.loggerDict.copy().items() if isinstance(logger, logging.Logger)}
    return {"": logging.getLogger().level, **{name: level for name, level in named.items() if level}}


def set_up_logging(levels: Mapping[str, int]) -> None:
    """Everything to stderr, as much as the process that made ``levels`` would show."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
