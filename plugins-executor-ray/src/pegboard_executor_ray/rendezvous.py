"""Where the ranks of an engine meet. Held by rank 0's actor, for as long as it lives."""

from __future__ import annotations

import datetime
import shutil
import socket
from typing import Any

from pegboard_executor_mp import traces
from pegboard_executor_ray.janitor import Janitor

_PATIENCE = datetime.timedelta(seconds=300)


class Folder:
    """For ranks on one node, which share memory."""

    def __init__(self) -> None:
        self.address = traces.make_rendezvous()
        self._janitor = Janitor("rm", "-rf", "--", self.address)

    def close(self) -> None:
        shutil.rmtree(self.address, ignore_errors=True)
        self._janitor.dismiss()


class Store:
    """For ranks on several nodes: served at ``ip``, at a port that stays taken from the moment it is found."""

    def __init__(self, ip: str) -> None:
        # only here: variables that torch reads must be set before
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
        port = listener.getsockname()[1]
        self._store: Any = TCPStore(
            ip,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_PATIENCE,
            master_listen_fd=listener.detach(),  # the store closes it
        )
        self.address = f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"

    def close(self) -> None:
        self._store = None
