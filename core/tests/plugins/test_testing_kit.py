"""What ``pegboard.testing`` gives to plugin authors: real distributions in a folder, and the fixture ``plugin_factory``."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.testing.distributions import forget_modules, write_distribution


def test_a_written_distribution_is_one_for_importlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"acme_kit": "X = 1", "acme_kit.inner.deep": "Y = 2", "acme_other": "Z = 3"}
    written = write_distribution(tmp_path, "acme-kit", modules, {"acme": "acme_kit"}, version="2.1", requires=["numpy>=1"])
    monkeypatch.syspath_prepend(str(tmp_path))
    found = importlib.metadata.distribution("acme-kit")
    assert (found.version, found.requires) == ("2.1", ["numpy>=1"])
    assert [(e.name, e.value) for e in found.entry_points.select(group="pegboard")] == [("acme", "acme_kit")]
    files = {str(f) for f in found.files or ()}
    assert {"acme_kit/__init__.py", "acme_kit/inner/__init__.py", "acme_kit/inner/deep.py", "acme_other.py"} <= files
    assert all(f.locate().exists() for f in found.files or ())
    assert importlib.import_module("acme_kit.inner.deep").Y == 2
    forget_modules(written.modules)
    assert not [m for m in sys.modules if m.startswith(("acme_kit", "acme_other"))]


@pytest.mark.slow
def test_the_fixture_works_in_an_author_s_own_project(tmp_path: Path) -> None:
    """In a process of its own, as an author runs it: nothing but the installed pytest plugin."""
    (tmp_path / "test_acme.py").write_text(
        "import subprocess, sys\n"
        "from pegboard.plugins import PluginHost\n"
        "SOURCE = 'from pegboard.plugins import *\\nfrom pegboard.plugins import hookimpl\\n@hookimpl\\n"
        'def request_queues(): return [RequestQueueProvider(name="acme", target="a:b")]\'\n'
        "def test_one(plugin_factory):\n"
        "    written = plugin_factory(SOURCE, name='acme-one')\n"
        "    assert 'acme' in PluginHost.load().providers('request_queue')\n"
        "    code = 'from pegboard.plugins import PluginHost as H; print(H.load().record(\"acme-one\").status)'\n"
        "    out = subprocess.run([sys.executable, '-c', code], env=written.environment, capture_output=True, text=True)\n"
        "    assert out.stdout.strip() == 'loaded', out\n"
        "def test_two():\n"
        "    assert PluginHost.load().record('acme-one') is None\n"
        "    assert 'acme_one' not in sys.modules\n"
        "def test_cheap():\n"
        "    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "3 passed" in run.stdout, run.stdout + run.stderr


def test_the_pytest_plugin_imports_nothing_of_pegboard() -> None:
    code = (
        "import sys, pegboard.testing.pytest_plugin\n"
        "own = sorted(m for m in sys.modules if m.startswith('pegboard.') and not m.startswith('pegboard.testing'))\n"
        "sys.exit(','.join(own) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
