"""Allow and block lists. They switch plugins off and on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import EngineConfig, PluginsConfig
from pegboard.plugins import PluginError, PluginHost, compose
from pegboard.testing.distributions import WrittenDistribution
from pegboard.testing.pytest_plugin import PluginFactory

PathOf = Callable[..., dict[str, str]]

SOURCE = """
import pathlib, sys
pathlib.Path({marker!r}).write_text("imported")
from pegboard.plugins import hookimpl, RequestQueueProvider
@hookimpl
def request_queues():
    return [RequestQueueProvider(name={name!r}, target="x:Queue")]
"""


@pytest.fixture
def three(plugin_factory: PluginFactory, tmp_path: Path, standard: WrittenDistribution):
    """Plugins a, b and c, of the distributions dist-a, dist-b and dist-c; a marker file tells which were imported."""

    def imported() -> set[str]:
        return {n for n in "abc" if (tmp_path / n).exists()}

    for n in "abc":
        source = SOURCE.format(marker=str(tmp_path / n), name=n)
        plugin_factory(source, name=f"dist-{n}", entry_point=n, module=f"module_{n}")
    return imported


def statuses(host: PluginHost) -> dict[str, str]:
    return {n: str(host.record(n).status) for n in "abc"}


LOADED, DISABLED, BLOCKED = "loaded", "disabled", "blocked"


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({}, {}, (LOADED, LOADED, LOADED)),
        ({"allow": ["a"]}, {}, (LOADED, DISABLED, DISABLED)),
        ({"allow": ["dist-a", "b"]}, {}, (LOADED, LOADED, DISABLED)),
        ({"allow": []}, {}, (DISABLED, DISABLED, DISABLED)),
        ({"block": ["b"]}, {}, (LOADED, BLOCKED, LOADED)),
        ({"block": ["Dist_B"]}, {}, (LOADED, BLOCKED, LOADED)),
        ({"block": ["dist-b:b"]}, {}, (LOADED, BLOCKED, LOADED)),
        ({"allow": ["a"], "block": ["a"]}, {}, (BLOCKED, DISABLED, DISABLED)),
        ({}, {"ALLOW": "a, dist-c"}, (LOADED, DISABLED, LOADED)),
        ({}, {"ALLOW": ""}, (DISABLED, DISABLED, DISABLED)),
        ({}, {"BLOCK": "a,c"}, (BLOCKED, LOADED, BLOCKED)),
        ({}, {"BLOCK": ""}, (LOADED, LOADED, LOADED)),
        ({}, {"ALLOW": "a,b", "BLOCK": "b"}, (LOADED, BLOCKED, DISABLED)),
        ({"block": ["a"]}, {"BLOCK": "b"}, (BLOCKED, BLOCKED, LOADED)),
        ({"allow": ["a", "b"]}, {"ALLOW": "b,c"}, (DISABLED, LOADED, DISABLED)),
    ],
)
def test_b093_lists(
    three: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    environment: dict[str, str],
    expected: Any,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"PEGBOARD_PLUGINS_{name}", value)
    host = PluginHost.inspect(PluginsConfig(**settings))
    assert tuple(statuses(host).values()) == expected
    assert three() == {n for n, s in zip("abc", expected, strict=True) if s == LOADED}
    assert host.record("standard").loaded
    assert not host.problems


def test_b093_the_standard_parts_can_be_blocked_but_not_left_out(three: Callable[[], set[str]]) -> None:
    assert PluginHost.inspect(PluginsConfig(allow=[])).record("standard").loaded
    blocked = PluginHost.inspect(PluginsConfig(block=["pegboard-plugins"])).record("standard")
    assert str(blocked.status) == BLOCKED


def test_b093_the_reason_names_the_setting(three: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_PLUGINS_BLOCK", "a")
    host = PluginHost.inspect(PluginsConfig(block=["b"], allow=["a", "b"]))
    reasons = {n: host.record(n).reason for n in "abc"}
    assert reasons == {
        "a": "blocked by PEGBOARD_PLUGINS_BLOCK",
        "b": "blocked by plugins.block",
        "c": "not listed in plugins.allow",
    }


def test_b093_unknown_names_are_warned_of(three: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_PLUGINS_BLOCK", "dist-bb")
    host = PluginHost.inspect(PluginsConfig(allow=["a", "nix"]))
    (block,) = [w for w in host.warnings if "dist-bb" in w]
    assert "PEGBOARD_PLUGINS_BLOCK" in block
    assert "did you mean 'dist-b'" in block
    (allow,) = [w for w in host.warnings if "'nix'" in w]
    assert "plugins.allow" in allow


def test_b093_not_imported_in_a_child_either(
    three: Callable[[], set[str]], standard: WrittenDistribution, plugin_factory: PluginFactory, tmp_path: Path, path_of: PathOf
) -> None:
    written = plugin_factory(SOURCE.format(marker=str(tmp_path / "d"), name="d"), name="dist-d", entry_point="d")
    code = "from pegboard.plugins import PluginHost; print(PluginHost.load().record('d').status)"
    environment = path_of(standard, written, PEGBOARD_PLUGINS_BLOCK="d")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert run.stdout.strip() == BLOCKED
    assert not (tmp_path / "d").exists()


def test_b093_enabling_what_is_blocked_is_an_error(three: Callable[[], set[str]]) -> None:
    with pytest.raises(PluginError, match=r"plugins\.enabled: plugin 'a' of dist-a 1\.0 is blocked: blocked by plugins\.block"):
        PluginHost.load(PluginsConfig(enabled=["a"], block=["dist-a"]))


@pytest.mark.parametrize(
    ("required", "told"),
    [
        ("dist-a", None),
        ("dist_a>=1.0", None),
        ("dist-a>=2", "dist-a 1.0 is installed; pip install -U"),
        ("dist-nowhere>=2", "is not installed; pip install 'dist-nowhere>=2'"),
        ("dist-b", "is blocked"),
        ("dist a", "is no requirement"),
    ],
)
def test_b093_required_distributions(three: Callable[[], set[str]], required: str, told: str) -> None:
    host = PluginHost.inspect(PluginsConfig(required=[required], block=["b"]))
    if told is None:
        assert not host.problems
    else:
        (problem,) = host.problems
        assert told in problem.message


PLATFORM = """
from pegboard.contracts.platform import Platform
from pegboard.plugins import hookimpl, PlatformProvider
class Device(Platform):
    name = device_type = {name!r}
    @classmethod
    def is_available(cls): return True
    def device_count(self): return 1
    def set_device(self, local_rank, num_threads): ...
    def memory(self): return 0, 0
    def preferred_dtype(self, stated): return "float32"
    def synchronize(self): ...
@hookimpl
def platforms():
    return [PlatformProvider(name={name!r}, target=Device, priority=50)]
"""


class TestTwoExclusivePlatforms:
    """Two platform plugins that both want the machine."""

    @pytest.fixture(autouse=True)
    def _installed(self, plugin_factory, standard) -> None:
        for name in ("npu", "tpu"):
            plugin_factory(PLATFORM.format(name=name), name=f"dist-{name}", entry_point=name, module=f"module_{name}")

    def device(self, **settings) -> str:
        device = settings.pop("device", "auto")
        return compose(EngineConfig(model="tiny", device=device, plugins=settings)).parts["platform"].name

    def test_installed_is_not_active(self) -> None:
        assert self.device() == "cpu"

    def test_both_enabled_is_an_error_that_names_both_and_the_setting(self) -> None:
        with pytest.raises(PluginError) as caught:
            self.device(enabled=["npu", "tpu"])
        for fact in ("dist-npu 1.0", "dist-tpu 1.0", "set device", "plugins.block"):
            assert fact in str(caught.value)

    def test_one_allowed(self) -> None:
        assert self.device(enabled=["npu"], block=["dist-tpu"]) == "npu"

    def test_one_named(self) -> None:
        assert self.device(device="tpu", enabled=["npu", "tpu"]) == "tpu"
