"""Real distributions in a folder, as an installer would leave them: for tests of plugins in their own process or another.

site = tmp_path / "site"
write_distribution(site, "acme-queue", {"acme_queue": SOURCE}, {"acme": "acme_queue"})
subprocess.run([sys.executable, ...], env=os.environ | {"PYTHONPATH": str(site)})
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

GROUP: Final = "pegboard"


@dataclass(frozen=True, slots=True)
class WrittenDistribution:
    """What was written, and where. ``folder`` belongs on ``sys.path``."""

    folder: Path
    name: str
    version: str
    modules: tuple[str, ...]
    metadata: Path

    @property
    def environment(self) -> dict[str, str]:
        """``os.environ`` with the folder first on ``PYTHONPATH``, for a subprocess."""
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, "PYTHONPATH": path}


def write_distribution(
    folder: Path,
    name: str,
    modules: Mapping[str, str] | None = None,
    entry_points: Mapping[str, str] | None = None,
    *,
    version: str = "1.0",
    requires: Sequence[str] = (),
    metadata: Literal["dist-info", "egg-info"] = "dist-info",
) -> WrittenDistribution:
    """Write modules and metadata of one distribution into ``folder``.

    Args:
        modules: dotted name to source text (dedented); packages on the way get an empty ``__init__``.
        entry_points: name to value, in the group ``pegboard``.
        requires: ``Requires-Dist`` lines.
        metadata: the form of the metadata folder; egg-info is what old setuptools leaves.
    """
    files: dict[str, str] = {}
    for dotted, source in (modules or {}).items():
        *parents, last = dotted.split(".")
        for depth in range(1, len(parents) + 1):
            files.setdefault("/".join([*parents[:depth], "__init__.py"]), "")
        has_children = any(other.startswith(f"{dotted}.") for other in modules or {})
        files["/".join([*parents, last, "__init__.py"] if has_children else [*parents, f"{last}.py"])] = textwrap.dedent(source)
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    info = f"{stem}.{metadata}"
    main = "METADATA" if metadata == "dist-info" else "PKG-INFO"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files[f"{info}/{main}"] = "\n".join(lines) + "\n"
    if entry_points:
        pairs = [f"{key} = {value}" for key, value in entry_points.items()]
        files[f"{info}/entry_points.txt"] = "\n".join([f"[{GROUP}]", *pairs]) + "\n"
    if metadata == "dist-info":
        files[f"{info}/INSTALLER"] = "pegboard.testing\n"
        files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    return WrittenDistribution(folder, name, version, tuple(modules or ()), folder / info)


def _record(files: Mapping[str, str], own: str) -> str:
    """Path, hash and size of every file, as installers write it."""
    lines = []
    for path, text in sorted(files.items()):
        content = text.encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}")
    return "\n".join([*lines, f"{own},,"]) + "\n"


def forget_modules(modules: Sequence[str]) -> dict[str, ModuleType]:
    """Take modules and what is inside them out of ``sys.modules``, so that they are imported afresh. Returns what was there."""
    tops = {m.split(".")[0] for m in modules}
    taken = {m: sys.modules.pop(m) for m in list(sys.modules) if m.split(".")[0] in tops}
    importlib.invalidate_caches()
    return taken
