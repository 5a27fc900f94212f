"""Which installed plugins are seen, and how often. The same distribution may be seen twice."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from pegboard.plugins import PluginHost
from pegboard.plugins.discovery import discover
from pegboard.testing.distributions import write_distribution
from pegboard.testing.pytest_plugin import PluginFactory

SOURCE = """
from pegboard.plugins import hookimpl, RequestQueueProvider
imported = 1
@hookimpl
def request_queues():
    return [RequestQueueProvider(name="acme", target="acme:Queue")]
"""


def seen(name: str) -> list[tuple[str, str]]:
    return [(p.version, p.value) for p in discover().plugins if p.distribution == name]


def test_finds_entry_points_without_importing(plugin_factory: PluginFactory) -> None:
    plugin_factory("raise SystemExit('imported')", name="acme-one")
    assert seen("acme-one") == [("1.0", "acme_one")]
    assert "acme_one" not in sys.modules


def test_order_does_not_depend_on_the_path(plugin_factory: PluginFactory) -> None:
    for name in ("zeta", "alpha", "midway"):
        plugin_factory(SOURCE, name=name)
    names = [p.entry_point for p in discover().plugins]
    assert names == sorted(names)


def test_b089_same_folder_twice_on_the_path(
    plugin_factory: PluginFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pegboard.plugins.discovery")
    written = plugin_factory(SOURCE, name="acme")
    monkeypatch.syspath_prepend(str(written.folder))
    monkeypatch.syspath_prepend(str(written.folder) + "/")
    assert seen("acme") == [("1.0", "acme")]
    assert any("twice" in r.message for r in caplog.records)
    host = PluginHost.load()
    assert list(host.providers("request_queue")).count("acme") == 1


@pytest.mark.parametrize("second", ["egg-info", "dist-info"])
def test_b089_editable_install_beside_metadata_of_the_same_version(
    plugin_factory: PluginFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, second: str
) -> None:
    """setuptools: src/ holds an egg-info, site-packages a dist-info; both are on the path."""
    caplog.set_level(logging.DEBUG, "pegboard.plugins.discovery")
    plugin_factory(SOURCE, name="acme", metadata="dist-info")
    write_distribution(tmp_path / "src", "acme", {"acme": SOURCE}, {"acme": "acme"}, metadata=second)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    found = discover()
    assert seen("acme") == [("1.0", "acme")]
    assert not [w for w in found.warnings if "acme" in w]
    assert any("visible twice" in r.message for r in caplog.records)
    host = PluginHost.load()
    assert [r.name for r in host.records if r.distribution == "acme"] == ["acme"]


def test_b089_egg_info_and_dist_info_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("egg-info", "dist-info"):
        write_distribution(tmp_path, "acme", {"acme": SOURCE}, {"acme": "acme"}, metadata=form)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert seen("acme") == [("1.0", "acme")]


def test_b089_twin_without_entry_points_does_not_hide_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path / "a", "acme", metadata="egg-info")
    write_distribution(tmp_path / "b", "acme", {"acme": SOURCE}, {"acme": "acme"})
    monkeypatch.syspath_prepend(str(tmp_path / "b"))
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    assert seen("acme") == [("1.0", "acme")]


def test_b089_empty_leftover_of_an_older_version_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme-0.9.dist-info").mkdir()
    write_distribution(tmp_path, "acme", {"acme": SOURCE}, {"acme": "acme"}, version="1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert seen("acme") == [("1.0", "acme")]
    assert not [w for w in discover().warnings if "acme" in w]


def test_b089_leftover_that_lost_its_metadata_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_distribution(tmp_path, "acme", {"acme": SOURCE}, {"acme": "acme"})
    (written.metadata / "METADATA").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert seen("acme") == []


@pytest.mark.parametrize(("first", "second"), [("1.0", "2.0"), ("2.0", "1.0")])
def test_b089_first_of_two_versions_on_the_path_counts_and_both_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    for version in (second, first):
        write_distribution(tmp_path / version, "acme", {"acme": SOURCE}, {"acme": "acme"}, version=version)
        monkeypatch.syspath_prepend(str(tmp_path / version))
    assert seen("acme") == [(first, "acme")]
    (warning,) = [w for w in PluginHost.inspect().warnings if "acme" in w]
    assert f"{first} in {tmp_path / first}" in warning
    assert f"{second} in {tmp_path / second}" in warning


@pytest.mark.parametrize(("lower", "higher"), [("1.9", "1.10"), ("1.8", "1.9"), ("2.0.dev1", "2.0")])
def test_b089_two_versions_in_one_folder_take_the_higher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lower: str, higher: str
) -> None:
    for version in (lower, higher):
        write_distribution(tmp_path, "acme", {"acme": SOURCE}, {"acme": "acme"}, version=version)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert seen("acme") == [(higher, "acme")]


def test_b089_spellings_of_one_name_are_one_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path / "a", "Acme_Queue", {"acme": SOURCE}, {"acme": "acme"})
    write_distribution(tmp_path / "b", "acme-queue", {"acme": SOURCE}, {"acme": "acme"})
    for site in ("a", "b"):
        monkeypatch.syspath_prepend(str(tmp_path / site))
    assert seen("acme-queue") == [("1.0", "acme")]


def test_two_entry_points_to_one_object_load_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "acme", {"acme": SOURCE}, {"one": "acme", "two": "acme"})
    monkeypatch.syspath_prepend(str(tmp_path))
    host = PluginHost.inspect()
    assert str(host.record("one").status) == "loaded"
    assert str(host.record("two").status) == "disabled"
    assert "same object" in host.record("two").reason
