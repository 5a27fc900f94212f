"""The folder in shared memory at which the ranks of one host meet."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import zlib
from typing import Final

from pegboard_plugins.communicators.peers import Process, this_host

_DIRECTORY: Final = "/dev/shm"
_PREFIX: Final = "pegboard-launched-"


def make_folder() -> str:
    """A new one, private to this user. Those of processes that were killed together with all their ranks are removed."""
    directory = _DIRECTORY if os.path.isdir(_DIRECTORY) else tempfile.gettempdir()
    _sweep(directory)
    me = Process.current()
    return tempfile.mkdtemp(prefix=f"{_own_prefix()}{me.pid}-{me.started}-", dir=directory)


def remove_folder(folder: str) -> None:
    """Whoever comes second finds nothing to do."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _own_prefix() -> str:
    """With what tells namespaces of process ids apart: containers may share the directory."""
    return f"{_PREFIX}{zlib.crc32(this_host().encode()):08x}-"


def _sweep(directory: str) -> None:
    prefix = _own_prefix()
    for name in os.listdir(directory):
        if not name.startswith(prefix):
            continue
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError, ValueError):  # it has gone, or is not ours
            pid, started = map(int, name.removeprefix(prefix).split("-")[:2])
            if Process(this_host(), pid, started).has_ended() and os.stat(path).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
