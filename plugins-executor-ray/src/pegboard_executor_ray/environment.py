"""What a rank's process takes over from the engine's: environment variables, import path, working folder, log levels."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from pegboard_executor_mp import process

NODES_OWN: Final = (
    # set for each process, by Ray or another launcher
    "RAY_*", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*",
    # the devices that a process may see
    "*_VISIBLE_DEVICES", "*_VISIBLE_CHIPS", "ONEAPI_DEVICE_SELECTOR",
    # a host's networks
    "*_SOCKET_IFNAME", "*_HOST_IP", "*_IB_HCA", "HOST", "HOSTNAME",
    # who and where a process is
    "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "TMPDIR", "TMP", "TEMP", "MAIL", "DISPLAY",
    "SSH_*", "XDG_*", "DBUS_*", "KUBERNETES_*", "SLURM_*", "PBS_*", "*_SERVICE_HOST", "*_SERVICE_PORT",
    # where an interpreter and its libraries are
    "PATH", "LD_*", "PYTHONHOME", "PYTHONPATH", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "CONDA_*",
)  # fmt: skip
"""Variables, by pattern, that a node's processes keep as they are there."""
CODE_OF_ITS_OWN: Final = ("working_dir", "py_modules", "pip", "uv", "conda", "container", "image_uri", "py_executable")
"""Parts of a runtime_env that say where code comes from."""


@dataclass(frozen=True)
class Surroundings:
    """Plain data: loading it imports no plugin."""

    variables: Mapping[str, str]
    sys_path: Sequence[str]
    folder: str
    own_code: bool
    """A runtime_env says where code comes from: that goes before the engine's import path, and the working folder stays."""
    log_levels: Mapping[str, int]
    files: Sequence[str] = ()
    """Files and folders that a rank needs where the engine has them."""

    @classmethod
    def here(
        cls, block: Iterable[str], carry: Iterable[str], runtime_env: Mapping[str, Any], files: Iterable[str] = ()
    ) -> Surroundings:
        """Of this process. What ``runtime_env`` sets is Ray's to give. ``files``: those that do not exist here are left out."""
        given = runtime_env.get("env_vars") or {}
        entries = [entry for entry in sys.path if isinstance(entry, str)]
        return cls(
            variables={name: text for name, text in carried(os.environ, block, carry).items() if name not in given},
            sys_path=tuple(os.path.abspath(entry) for entry in entries),
            folder=os.getcwd(),
            own_code=any(runtime_env.get(part) for part in CODE_OF_ITS_OWN),
            log_levels=process.log_levels(),
            files=tuple(os.path.abspath(file) for file in files if os.path.exists(file)),
        )

    def enter(self) -> None:
        """Make this process look like the one that they were taken from, as far as this node has the same folders. Raises
        ``FileNotFoundError`` for ``files`` that are not there."""
        os.environ.update(self.variables)
        theirs = [entry for entry in self.sys_path if os.path.exists(entry)]
        first, then = (sys.path, theirs) if self.own_code else (theirs, sys.path)
        sys.path[:] = dict.fromkeys([*first, *then])
        if not self.own_code and os.path.isdir(self.folder):
            os.chdir(self.folder)
        for file in self.files:
            if not os.path.exists(file):
                raise FileNotFoundError(
                    f"{file}, where the engine has its model, does not exist here; ranks read it under the same path: put it "
                    "there, or on a file system that all nodes share"
                )


def carried(variables: Mapping[str, str], block: Iterable[str], carry: Iterable[str]) -> dict[str, str]:
    """Those of ``variables`` that ranks get: all but ``block`` and, unless ``carry`` has them, ``NODES_OWN``."""
    blocked, wanted = tuple(block), tuple(carry)
    return {
        name: text
        for name, text in variables.items()
        if not _matches(name, blocked) and (_matches(name, wanted) or not _matches(name, NODES_OWN))
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
