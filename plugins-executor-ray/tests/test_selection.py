"""What executor.name = "auto" means, on hosts and in processes of all kinds. Ray itself is a stand-in here."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.plugins import ExecutorProvider, PluginHost, compose
from pegboard.testing.ranked_model import RankedPlugin
from pegboard_executor_ray import selection
from pegboard_executor_ray.selection import choose

SetUp = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """``host(gpus, cores, bundles, nodes)``: ``bundles`` of the current placement group, ``nodes`` of the connected cluster."""

    def set_up(gpus: int = 0, cores: int = 2, bundles: int | None = None, nodes: int | None = None) -> None:
        monkeypatch.setattr(selection.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(gpus)])
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
            monkeypatch.delenv(name, raising=False)
        fake: Any = types.ModuleType("ray")
        fake.is_initialized = lambda: nodes is not None
        fake.nodes = lambda: [{"Alive": True}] * (nodes or 0) + [{"Alive": False}] * 3
        groups: Any = types.ModuleType("ray.util.placement_group")
        group = None if bundles is None else types.SimpleNamespace(bundle_specs=[{}] * bundles)
        groups.get_current_placement_group = lambda: group
        monkeypatch.setitem(sys.modules, "ray", fake)
        monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
        monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)
        monkeypatch.setattr(selection, "find_spec", lambda name: object())

    set_up()
    return set_up


def chosen(tp: int = 1, pp: int = 1, *, device: str = "auto", offered: tuple[str, ...] = ("ray", "ray-mq")) -> tuple[str, str]:
    executor: Any = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    candidates = {n: ExecutorProvider(name=n, target="a:b", capabilities=frozenset({"tp", "pp"})) for n in offered}
    found = choose(EngineConfig(model="any", executor=executor, device=device), candidates)
    return ("", "") if found is None else (str(found), found.reason)


def test_what_fits_on_this_host_stays(host: SetUp) -> None:
    assert chosen(2) == ("", ""), "no GPUs, no cluster"
    host(nodes=1)
    assert chosen(8) == ("", ""), "a cluster of this host alone has no more cores"
    host(nodes=3, cores=4)
    assert chosen(2, 2) == ("", "")
    host(gpus=4)
    assert chosen(2, 2) == ("", "")


def test_more_ranks_than_gpus(host: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    host(gpus=4)
    assert chosen(4, 2) == ("ray-mq", "8 ranks need as many GPUs, and this host has 4")
    assert chosen(4, 2, device="cpu") == ("", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert chosen(4) == ("ray-mq", "4 ranks need as many GPUs, and this host has 2")
    host()
    assert chosen(device="cuda") == ("", ""), "nor is there a cluster"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert chosen(device="cuda") == ("ray-mq", "a rank needs a GPU, and this host has none")
    assert chosen(2) == ("", ""), "on processors"
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert selection.visible_gpus() == 0


def test_more_ranks_than_cores_where_there_are_other_nodes(host: SetUp) -> None:
    host(nodes=2, cores=2)
    assert chosen(3) == ("ray-mq", "3 ranks are more than the 2 cores of this host, and 2 Ray nodes are connected")


def test_inside_a_placement_group(host: SetUp) -> None:
    host(bundles=3, nodes=1, cores=64)
    assert chosen(2) == ("ray-mq", "this process runs in a Ray placement group, which is to hold the 2 ranks")
    assert chosen() == ("ray-mq", "this process runs in a Ray placement group with 2 more bundles")
    host(bundles=1, nodes=1)
    assert chosen() == ("", ""), "the only bundle is this process's own"
    assert chosen(2)[0] == "ray-mq", "to be refused by it, not to take what others have"


def test_between_the_two(host: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    host(gpus=1)
    assert chosen(2, offered=("mp", "ray"))[0] == "ray"
    assert chosen(2, offered=("mp",))[0] == ""
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert chosen(2) == ("", ""), "Ray is not installed"


def test_ray_is_not_imported_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert chosen(64, device="cpu") == ("", "")
    assert "ray" not in sys.modules
    assert importlib.util.find_spec("ray") is not None


def test_the_reason_reaches_the_composition(host: SetUp) -> None:
    host(gpus=1)
    config = EngineConfig(model="scripted", executor={"tensor_parallel_size": 3})  # type: ignore[arg-type]
    composition = compose(config, PluginHost.load(config.plugins, extra={"ranked": RankedPlugin()}))
    assert composition.parts["executor"].name == "ray-mq"
    reason = composition.reasons["executor"]
    assert reason.startswith(
        "3 ranks need as many GPUs, and this host has 1; chosen by select_executor of plugin 'executor_ray' of"
    )
