"""Puts away what a process has made outside itself when that process ends, however it ends.

Ray ends actors with SIGKILL, and with them their child processes; what is to be left standing must be nobody's child.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from typing import Final

_SCRIPT: Final = 'exec 3<&0; { read -r _ <&3 || exec "$@" 3<&-; } </dev/null &'
"""Reads a line, or until there is nobody left who could write; dash knows no descriptors above 9."""


class Janitor:
    """A shell in a session of its own that waits for the end of this process, or for ``dismiss``, and then runs ``command``, with
    ``environment`` and what it takes to find programs."""

    def __init__(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        read_end, self._line = os.pipe()
        try:
            subprocess.run(
                ["/bin/sh", "-c", _SCRIPT, "pegboard-janitor", *command],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", **(environment or {})},
                cwd="/",
                start_new_session=True,
                check=True,
            )
        finally:
            os.close(read_end)

    def dismiss(self) -> None:
        """Have it run the command now. Idempotent."""
        line, self._line = self._line, -1
        if line >= 0:
            with contextlib.suppress(OSError):
                os.close(line)

    def send_home(self) -> None:
        """It is not needed any more: nothing is left to put away. Idempotent."""
        if self._line >= 0:
            with contextlib.suppress(OSError):
                os.write(self._line, b"\n")
        self.dismiss()
