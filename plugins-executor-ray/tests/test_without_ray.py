"""Where Ray is not installed: the plugin is listed, and a name of its executors says what to install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.plugins import PluginHost, UnknownProviderError
from pegboard.plugins.discovery import normalized

NO_RAY = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] == "ray" else found(name, *more)
"""


def pegboard(tmp_path: Path, *arguments: str, ray: bool = False) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command line in a process where ``import ray`` fails, or would be seen."""
    watch = "import atexit, sys\natexit.register(lambda: 'ray' in sys.modules and sys.stderr.write('RAY WAS IMPORTED'))"
    (tmp_path / "sitecustomize.py").write_text(watch if ray else NO_RAY)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import sys; from pegboard.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("ray", [True, False])
def test_listing_needs_no_ray(tmp_path: Path, ray: bool) -> None:
    status, out, err = pegboard(tmp_path, "plugins", "list", "--json", ray=ray)
    assert (status, err) == (0, "")
    (record,) = [record for record in json.loads(out) if record["name"] == "executor_ray"]
    assert record["status"] == "loaded"
    assert [provider["name"] for provider in record["providers"]] == ["ray", "ray-mq"]
    status, out, err = pegboard(tmp_path, "plugins", "show", "executor", ray=ray)
    assert (status, err) == (0, "")
    assert "chosen: uniproc (one rank)" in out


@pytest.mark.parametrize("name", ["ray", "ray-mq"])
def test_a_package_without_ray_says_what_to_install(tmp_path: Path, name: str) -> None:
    status, out, _ = pegboard(tmp_path, "plugins", "check", f"executor:{name}")
    assert status == 1
    assert f"executor {name!r} of plugin 'executor_ray'" in out
    assert "No module named 'ray'" in out
    assert "pip install 'ray>=" in out


@pytest.fixture
def package_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions, version = importlib.metadata.distributions, importlib.metadata.version

    def is_ours(name: str) -> bool:
        return normalized(name) == "pegboard-executor-ray"

    def version_of(name: str) -> str:
        if is_ours(name):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    def visible(**filters: Any) -> Iterator[importlib.metadata.Distribution]:
        return (dist for dist in distributions(**filters) if not is_ours(dist.metadata["Name"] or ""))

    monkeypatch.setattr(importlib.metadata, "distributions", visible)
    monkeypatch.setattr(importlib.metadata, "version", version_of)


@pytest.mark.usefixtures("package_absent")
@pytest.mark.parametrize("name", ["ray", "ray-mq"])
def test_without_the_package_its_name_is_told(name: str) -> None:
    config = EngineConfig(model="any", executor={"name": name})  # type: ignore[arg-type]
    with pytest.raises(UnknownProviderError, match="pip install pegboard-executor-ray"):
        PluginHost.load(config.plugins).get("executor", name)
