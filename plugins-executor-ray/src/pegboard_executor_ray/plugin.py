"""The Ray executors, offered to Pegboard. Imports no part, and nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.plugins import ExecutorProvider, hookimpl


@hookimpl
def executors() -> Iterable[ExecutorProvider]:
    return ()
