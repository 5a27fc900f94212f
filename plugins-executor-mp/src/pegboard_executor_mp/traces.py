"""What the processes of an engine leave outside themselves, and how it goes away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable

from pegboard_executor_mp.queue import segment


def make_rendezvous() -> str:
    """A folder in memory for the ranks of one engine, private to this user."""
    return tempfile.mkdtemp(prefix=f"pegboard-mp-{os.getpid()}-", dir=segment.DIRECTORY)


def remove(rendezvous: str, queue: str, ranks: Iterable[int]) -> None:
    """Of an engine whose ranks have ended: the folder, the segment of the queue to them, and those that they made, which bear
    their pids. Whoever comes second finds nothing to do."""
    shutil.rmtree(rendezvous, ignore_errors=True)
    segment.unlink(queue)
    made = tuple(f"{segment.PREFIX}{pid}-" for pid in ranks)
    with contextlib.suppress(OSError):
        for name in os.listdir(segment.DIRECTORY):
            if name.startswith(made):
                segment.unlink(name)
