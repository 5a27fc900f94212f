"""Fixtures for plugin authors. Imports nothing of Pegboard until a fixture is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from pegboard.testing.distributions import WrittenDistribution


class PluginFactory(Protocol):
    """The fixture ``plugin_factory``."""

    def __call__(
        self, source: str, *, name: str = ..., entry_point: str | None = ..., module: str | None = ..., **options: Any
    ) -> WrittenDistribution:
        """Install a distribution with one plugin module into this test's environment.

        ``source`` is the module's text; ``name`` the distribution's; entry point and module are named after it. ``options`` go to
        ``write_distribution`` (``version``, ``requires``, ``metadata``), and ``folder`` says where to install it.
        """
        ...


@pytest.fixture
def plugin_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginFactory]:
    """Install plugins as real distributions, each in a folder of its own that is put first on ``sys.path``; for other processes
    see ``WrittenDistribution.environment``. Undone after the test."""
    from pegboard.testing.distributions import forget_modules, write_distribution

    written: list[WrittenDistribution] = []
    hidden: dict[str, Any] = {}

    def install(
        source: str,
        *,
        name: str = "acme-plugin",
        entry_point: str | None = None,
        module: str | None = None,
        folder: Path | None = None,
        **options: Any,
    ) -> WrittenDistribution:
        module = module or name.replace("-", "_")
        folder = folder or tmp_path / "sites" / str(len(written))
        points = {entry_point or name: module}
        distribution = write_distribution(folder, name, {module: source}, points, **options)
        taken = forget_modules([module])
        if not any(module in earlier.modules for earlier in written):
            hidden.update(taken)  # imported by the tests from elsewhere: theirs again afterwards
        written.append(distribution)
        monkeypatch.syspath_prepend(str(folder))
        return distribution

    yield install
    forget_modules([m for distribution in written for m in distribution.modules])
    sys.modules.update(hidden)
