"""Work in a thread of its own, also when the interpreter ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pegboard_executor_ray import autostart


def run(name: str, target: Callable[..., None], *args: Any) -> threading.Thread | None:
    """The thread. None: it is done already, by the caller, as an interpreter that ends may start no threads (Python 3.12)."""
    thread = autostart.never_from(threading.Thread(target=target, args=args, name=f"pegboard-ray-{name}", daemon=True))
    try:
        thread.start()
    except RuntimeError:
        target(*args)
        return None
    return thread
