"""The multi-process executor, offered to Pegboard. Imports no part."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.plugins import ConfigSection, ExecutorProvider, hookimpl

_HERE = "pegboard_executor_mp"


@hookimpl
def executors() -> Iterable[ExecutorProvider]:
    yield ExecutorProvider(
        name="mp",
        target=f"{_HERE}.executor:MultiprocExecutor",
        capabilities=frozenset({"tp", "pp", "async_steps"}),
        summary="one process per rank on this host, commands over shared memory",
    )


@hookimpl
def config_sections() -> Iterable[ConfigSection]:
    yield ConfigSection("executor_mp", f"{_HERE}.options:Options", summary="queues, time limits and start of the ranks")
