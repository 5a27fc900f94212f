"""What scripts that make documentation pages share: write a folder of pages, or check that it is as it should be."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(folder: Path, pages: Mapping[str, str]) -> int:
    """Make ``folder`` hold exactly ``pages`` (file name to text). With ``--check`` on the command line only compare: 1 if a page
    is missing, stale or left over."""
    present = {p.name: p.read_text() for p in folder.glob("*.md")}
    stale = sorted(name for name in pages.keys() | present.keys() if pages.get(name) != present.get(name))
    if "--check" in sys.argv:
        for name in stale:
            print(
                f"{folder.name}/{name} does not match the source; run: python scripts/{Path(sys.argv[0]).name}", file=sys.stderr
            )
        return bool(stale)
    folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in pages:
            (folder / name).write_text(pages[name])
        else:
            (folder / name).unlink()
    return 0
