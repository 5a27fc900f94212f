"""Executors of this package on a model without weights, so that no process needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.plugins import Composition, PluginHost, compose
from pegboard.testing.scripted_model import ScriptedPlugin
from pegboard_executor_mp.executor import MultiprocExecutor

RPC_WORKER = "pegboard.testing.rpc_worker:RpcWorker"
MakeExecutor = Callable[..., MultiprocExecutor]


def composition(ranks: int = 2, *, options: dict[str, Any] | None = None, plugin: object = None, **executor: Any) -> Composition:
    settings = {"name": "mp", "worker": RPC_WORKER, "tensor_parallel_size": ranks, **executor}
    config = EngineConfig(model="scripted", executor=settings, plugins={"executor_mp": {"preload": [], **(options or {})}})
    return compose(config, PluginHost.load(config.plugins, extra={"scripted": plugin or ScriptedPlugin()}))


def make(ranks: int = 2, **more: Any) -> MultiprocExecutor:
    parts = composition(ranks, **more)
    executor = parts.create("executor")
    assert isinstance(executor, MultiprocExecutor)
    return executor


@pytest.fixture
def make_executor() -> Iterator[MakeExecutor]:
    """``make_executor(ranks, options=..., worker=...)``; shut down after the test."""
    made: list[MultiprocExecutor] = []

    def make_one(*args: Any, **more: Any) -> MultiprocExecutor:
        made.append(make(*args, **more))
        return made[-1]

    yield make_one
    for executor in made:
        executor.shutdown()
