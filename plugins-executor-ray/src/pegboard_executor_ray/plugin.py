"""The Ray executors, offered to Pegboard. Imports no part, and nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pegboard.plugins import Chosen, ConfigSection, ExecutorProvider, hookimpl

if TYPE_CHECKING:
    from pegboard.config import EngineConfig

_HERE = "pegboard_executor_ray"
_CAPABILITIES = frozenset({"tp", "pp", "async_steps", "multi_node", "ray"})


@hookimpl
def executors() -> Iterable[ExecutorProvider]:
    yield ExecutorProvider(
        name="ray",
        target=f"{_HERE}.executor:RayExecutor",
        capabilities=_CAPABILITIES,
        summary="one actor per rank on a Ray cluster, calls through a compiled graph",
    )
    yield ExecutorProvider(
        name="ray-mq",
        target=f"{_HERE}.queue_executor:RayQueueExecutor",
        capabilities=_CAPABILITIES,
        summary="one actor per rank on a Ray cluster, calls over the message queue",
    )


@hookimpl
def config_sections() -> Iterable[ConfigSection]:
    yield ConfigSection("executor_ray", f"{_HERE}.options:Options", summary="the cluster, and what ranks reserve and are given")


@hookimpl
def select_executor(config: EngineConfig, candidates: Mapping[str, ExecutorProvider]) -> Chosen | None:
    from pegboard_executor_ray.selection import choose

    return choose(config, candidates)
