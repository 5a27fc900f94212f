"""What the processes of an engine leave outside themselves, and how it goes away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from typing import Final

from pegboard_executor_mp.queue import segment

_PREFIX: Final = "pegboard-mp-"


def make_rendezvous() -> str:
    """A folder in memory for the ranks of one engine, private to this user. Those of engines that were killed with all of their
    processes go."""
    for orphan in segment.orphans(_PREFIX):
        shutil.rmtree(os.path.join(segment.DIRECTORY, orphan), ignore_errors=True)
    return tempfile.mkdtemp(prefix=segment.own_names(_PREFIX), dir=segment.DIRECTORY)


def remove(rendezvous: str, queue: str, ranks: Iterable[int]) -> None:
    """Of an engine whose ranks have ended, or are about to: the folder, the segment of the queue to them, and those that they
    made. ``ranks``: their pids. Whoever comes second finds nothing to do."""
    shutil.rmtree(rendezvous, ignore_errors=True)
    remove_queues(queue, ranks)


def remove_queues(queue: str | None, ranks: Iterable[int]) -> None:
    """The second part of ``remove``. ``queue``: None where no rank shares memory with this process."""
    if queue is not None:
        segment.unlink(queue)
    pids = set(ranks)
    with contextlib.suppress(OSError):
        for name, owner in segment.owned(segment.PREFIX):
            if owner.pid in pids:
                segment.unlink(name)
