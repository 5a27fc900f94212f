"""PluginManifest: a process loads exactly the plugins of the one that started it, or refuses."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest

from pegboard.config import PluginsConfig
from pegboard.plugins import PluginError, PluginHost, PluginManifest, hookimpl
from pegboard.testing.distributions import write_distribution
from pegboard.testing.pytest_plugin import PluginFactory

pytestmark = pytest.mark.usefixtures("standard")

SOURCE = """
from pegboard.plugins import RequestQueueProvider, hookimpl
@hookimpl
def request_queues(): return [RequestQueueProvider(name=__name__, target="a:b")]
"""


def manifest_of(**settings) -> PluginManifest:
    return PluginHost.load(PluginsConfig(**settings)).manifest()


def test_holds_what_is_in_use_and_loads_nothing_else(plugin_factory: PluginFactory) -> None:
    plugin_factory(SOURCE, name="acme")
    plugin_factory(SOURCE, name="idle")
    manifest = manifest_of(enabled=["acme"])
    assert {p.name for p in manifest.plugins} == {"standard", "acme"}
    child = PluginHost.load(manifest=manifest)
    assert {r.name for r in child.records} == {"standard", "acme"}
    assert [(r.name, r.active) for r in child.records] == [(p.name, p.active) for p in manifest.plugins]
    assert child.manifest() == manifest


def test_crosses_as_json() -> None:
    manifest = manifest_of()
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=PluginManifest) == manifest


def test_allow_and_block_lists_do_not_apply_a_second_time(plugin_factory: PluginFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin_factory(SOURCE, name="acme")
    manifest = manifest_of(enabled=["acme"])
    monkeypatch.setenv("PEGBOARD_PLUGINS_BLOCK", "acme")
    assert PluginHost.load(manifest=manifest).record("acme").loaded


def changed(manifest: PluginManifest, name: str, **fields) -> PluginManifest:
    plugins = tuple(msgspec.structs.replace(p, **fields) if p.name == name else p for p in manifest.plugins)
    return msgspec.structs.replace(manifest, plugins=plugins)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"version": "9.9"}, "plugin 'acme' of acme 9.9 is version 1.0 here"),
        ({"distribution": "elsewhere"}, "plugin 'acme' of elsewhere 1.0 is not installed here"),
        ({"entry_point": "other"}, "plugin 'other' of acme 1.0 is not installed here"),
        ({"value": "other_module"}, "points to 'acme' here and to 'other_module' there"),
    ],
)
def test_a_difference_is_refused(plugin_factory: PluginFactory, fields: dict[str, str], told: str) -> None:
    plugin_factory(SOURCE, name="acme")
    with pytest.raises(PluginError, match="would not load the plugins of the process that started it") as caught:
        PluginHost.load(manifest=changed(manifest_of(enabled=["acme"]), "acme", **fields))
    assert told in str(caught.value)
    assert sys.executable in str(caught.value)


def test_another_host_version_is_refused() -> None:
    with pytest.raises(PluginError, match=r"pegboard is .* here and 0\.0\.0 there"):
        PluginHost.load(manifest=msgspec.structs.replace(manifest_of(), host_version="0.0.0"))


def test_all_differences_are_told(plugin_factory: PluginFactory) -> None:
    for name in ("acme", "beta"):
        plugin_factory(SOURCE, name=name)
    manifest = manifest_of(enabled=["acme", "beta"])
    for name in ("acme", "beta"):
        manifest = changed(manifest, name, version="9")
    with pytest.raises(PluginError) as caught:
        PluginHost.load(manifest=manifest)
    assert "acme 9" in str(caught.value)
    assert "beta 9" in str(caught.value)


def test_a_plugin_that_breaks_in_the_child_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE + "import os\nif os.environ.get('CHILD'): raise RuntimeError('boom-17')"
    write_distribution(tmp_path, "acme", {"acme_m": source}, {"acme": "acme_m"})
    monkeypatch.syspath_prepend(str(tmp_path))
    manifest = manifest_of(enabled=["acme"])
    sys.modules.pop("acme_m")
    monkeypatch.setenv("CHILD", "1")
    with pytest.raises(PluginError, match="boom-17"):
        PluginHost.load(manifest=manifest)


class TestGivenDirectly:
    """A plugin that a script gives to the host, without an entry point."""

    def loaded(self, plugin: object) -> PluginManifest:
        return PluginHost.load(extra={"mine": plugin}, discovery=False).manifest()

    def test_a_module_travels_by_name(self, tmp_path, monkeypatch) -> None:
        import importlib

        write_distribution(tmp_path, "unrelated", {"direct_m": SOURCE})
        monkeypatch.syspath_prepend(str(tmp_path))
        manifest = self.loaded(importlib.import_module("direct_m"))
        assert (manifest.plugins[0].value, manifest.plugins[0].payload) == ("direct_m", "")
        assert "direct_m" in PluginHost.load(manifest=manifest).providers("request_queue")

    def test_an_object_travels_by_value(self) -> None:
        class Plugin:
            def __init__(self, word):
                self.word = word

            @hookimpl
            def validate_request(self, request):
                raise ValueError(self.word)

        child = PluginHost.load(manifest=self.loaded(Plugin("from the parent")))
        with pytest.raises(ValueError, match="from the parent"):
            child.hook.validate_request(request=None)

    def test_one_that_cannot_travel_says_so_only_when_it_must(self) -> None:
        import threading

        class Plugin:
            lock = threading.Lock()

            def __init__(self):
                self.own = threading.Lock()

        host = PluginHost.load(extra={"mine": Plugin()}, discovery=False)
        with pytest.raises(PluginError, match=r"plugin 'mine' \(given directly\) cannot be sent.*give it an entry point"):
            host.manifest()

    def test_the_script_itself_cannot_travel(self, tmp_path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import sys\nfrom pegboard.plugins import PluginHost\n"
            "host = PluginHost.load(extra={'mine': sys.modules[__name__]}, discovery=False)\nhost.manifest()\n"
        )
        run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
        assert "it is the script's own module" in run.stderr

    def test_one_whose_module_is_gone_in_the_child(self) -> None:
        module = types.ModuleType("made_at_run_time")
        sys.modules["made_at_run_time"] = module
        manifest = self.loaded(module)
        del sys.modules["made_at_run_time"]
        with pytest.raises(PluginError, match="cannot be made again in this process"):
            PluginHost.load(manifest=manifest)
