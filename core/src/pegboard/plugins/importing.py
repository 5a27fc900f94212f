"""Importing one plugin without letting it take the host down.

Whatever it raises, ``SystemExit`` included, is caught by the caller. What it prints goes to stderr, so that the output of
machine-readable commands stays clean. An import that never returns cannot be ended from inside the process (Python has no
means to stop a thread); what can be done is to say after some seconds which plugin is holding things up.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from pegboard.plugins.errors import PluginError
from pegboard.plugins.record import PluginRecord

SLOW_SECONDS = 5.0
"""After this many seconds of waiting for one plugin a line on stderr names it."""


@contextlib.contextmanager
def guarded(record: PluginRecord) -> Iterator[None]:
    """Around any code of a plugin that runs while the host loads it."""
    seconds = SLOW_SECONDS

    def tell() -> None:
        print(
            f"pegboard: still waiting for {record.label} ({record.value}) after {seconds:g} s; if it never returns, end this "
            f"process and start it with PEGBOARD_PLUGINS_BLOCK={record.entry_point}",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        timer.cancel()


def import_plugin(record: PluginRecord) -> Any:
    """The object behind the entry point: a module, or an object with hook implementations; a class is instantiated."""
    module_name, _, attributes = record.value.partition(":")
    found: Any = importlib.import_module(module_name.strip())
    for part in filter(None, attributes.strip().split(".")):
        if not hasattr(found, part):
            raise PluginError(
                f"{record.value!r} points to nothing: {getattr(found, '__name__', found)!s} has no attribute {part!r}"
            )
        found = getattr(found, part)
    return found() if isinstance(found, type) else found
