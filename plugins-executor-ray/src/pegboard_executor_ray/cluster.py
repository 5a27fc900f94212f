"""The Ray cluster that an engine uses: one that it finds, or one on this machine that it starts, and ends, itself."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import ray

from pegboard.engine.errors import EngineStartError
from pegboard_executor_ray import autostart
from pegboard_executor_ray.options import Options
from pegboard_executor_ray.place import Place
from pegboard_executor_ray.waiting import asking

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES: Final = 256 << 20
"""Of a Ray of the engine's own: what passes between engine and ranks is small."""
_PROBE_SECONDS: Final = 5.0
_NONE_HERE: Final = "Could not find any running Ray instance"
"""Of Ray's message: what tells this from a cluster that is there and refuses."""
_SETTING: Final = "plugins.executor_ray.address"


Session = tuple[str, str]
_own: Final[dict[Session, int]] = {}
"""The Ray that engines of this process have started, if any, and how many of them use it."""
_joining: Final = threading.RLock()


class Cluster:
    """Connected when made. ``owned``: started here, or by another engine of this process; the last one to ``leave`` ends it."""

    def __init__(self, options: Options, need: Mapping[str, float], ranks: int) -> None:
        """``need``: what each of so many ``ranks`` reserves. A Ray that is started here has that, where numbers are free to
        choose. Raises ``EngineStartError``."""
        with _joining:
            started = _connect(options, need, ranks)
            self._session = _session()
            self.owned = started or self._session in _own
            if self.owned:
                _own[self._session] = _own.get(self._session, 0) + 1
        try:
            self.driver = Place.here(rank=False)
            if self.owned:
                _check_own(need, ranks)
        except BaseException:
            self.leave()
            raise

    @property
    def connected(self) -> bool:
        """Still to the same Ray. To be asked before anything is asked of Ray, which might start a new one."""
        with autostart.held(), asking:
            try:
                return ray.is_initialized() and _session() == self._session
            except Exception:  # it was shut down in between
                return False

    def leave(self) -> None:
        """Idempotent."""
        with _joining:
            owned, self.owned = self.owned, False
            if not owned:
                return
            _own[self._session] -= 1
            if not _own[self._session]:
                del _own[self._session]
                if self.connected:
                    ray.shutdown()


def _session() -> Session:
    """Jobs are numbered from 1 in every cluster; nodes have other ids in each."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _connect(options: Options, need: Mapping[str, float], ranks: int) -> bool:
    """Returns whether it was started here. A connection that this process has already is used, whatever ``options`` say."""
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if options.address and options.address not in ("auto", there):
            log.warning("this process is connected to the Ray cluster at %s; %s=%r is not used", there, _SETTING, options.address)
        return False
    common: dict[str, Any] = {"namespace": options.namespace, "log_to_driver": True}
    address = options.address or os.environ.get("RAY_ADDRESS") or ""
    if address != "local":
        if address not in ("", "auto"):
            _probe(address)
        try:
            ray.init(address=address or "auto", **common)
            return False
        except (Exception, SystemExit) as error:  # Ray exits where a cluster does not answer
            if _NONE_HERE not in str(error):
                raise EngineStartError(_failed(address, error)) from error
            if address or not options.start_local:
                raise EngineStartError(f"{_SETTING}: no Ray runs on this machine; start one with 'ray start --head'") from error
    log.info("no Ray cluster found: starting one on this machine, for this engine alone")
    with _unless_set("RAY_USAGE_STATS_ENABLED", "0"):
        ray.init(
            address="local",
            num_cpus=max(len(os.sched_getaffinity(0)), math.ceil(ranks * need.get("CPU", 0))),
            resources={name: ranks * amount for name, amount in need.items() if name not in ("CPU", "GPU")} or None,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **common,
        )
    return True


def _probe(address: str) -> None:
    """Ray itself would try for minutes, and then end this process."""
    if "://" in address:
        raise EngineStartError(
            f"{_SETTING}: {address!r} is no address of a cluster. The engine has to run on one of its nodes, with 'auto' or "
            "'host:port'; from elsewhere, send the whole script with 'ray job submit'"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise EngineStartError(f"{_SETTING}: {address!r} must be 'host:port', 'auto' or 'local'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        raise EngineStartError(f"{_SETTING}: nobody answers at {address}: {error}") from error


def _failed(address: str, error: BaseException) -> str:
    token = "" if os.environ.get("RAY_AUTH_MODE") == "token" else "; does the cluster ask for a token (RAY_AUTH_MODE=token)?"
    return f"{_SETTING}: connecting to the Ray cluster at {address or 'auto'} failed: {type(error).__name__}: {error}{token}"


@contextlib.contextmanager
def _unless_set(name: str, text: str) -> Iterator[None]:
    if name in os.environ:
        yield
        return
    os.environ[name] = text
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _check_own(need: Mapping[str, float], ranks: int) -> None:
    """Nothing will ever join a Ray that was started for one engine."""
    total = ray.cluster_resources()
    short = {name: amount for name, amount in need.items() if total.get(name, 0) < ranks * amount}
    if short:
        wanted = ", ".join(f"{ranks} x {name}: {amount:g}" for name, amount in short.items())
        there = ", ".join(f"{name}: {total.get(name, 0):g}" for name in short)
        raise EngineStartError(
            f"the ranks reserve {wanted}, and the Ray that was started on this machine has {there}; set {_SETTING} to a cluster "
            "that has them"
        )
