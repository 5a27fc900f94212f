"""A Ctrl-C at a chosen moment."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupt_at(function: Any, line: int, call: Callable[[], object], never: str | None = None) -> bool:
    """``call()``, in which ``KeyboardInterrupt`` is raised before line number ``line``, from 0 in the order in which they run, of
    ``function``. Returns whether it was: False when fewer lines run.

    Python itself runs signals' handlers only after calls and at jumps. So there may be lines that are never interrupted, as no
    call comes before: those with the text ``never``, and the one before, which may be a ``try``.
    """
    count = -1

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        lines = linecache.getlines(frame.f_code.co_filename)[frame.f_lineno - 1 : frame.f_lineno + 1]
        if event == "line" and (never is None or never not in "".join(lines)):
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return on_line

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: on_line if frame.f_code is function.__code__ else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
