"""Watches the actors of one engine, and tells once when one is lost that was not meant to end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray

from pegboard.contracts.executor import ExecutorFailed
from pegboard_executor_ray import autostart
from pegboard_executor_ray.cluster import Cluster
from pegboard_executor_ray.loss import how_it_ended
from pegboard_executor_ray.place import Place
from pegboard_executor_ray.waiting import asking, wait

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""Between looks whether this process is still connected."""
_DISCONNECTED: Final = "this process is no longer connected to the Ray cluster that has the ranks"


class Watch:
    """``stays``: a reference per rank, in rank order, that is ready when the rank has ended."""

    def __init__(
        self, cluster: Cluster, stays: Sequence[Any], places: Sequence[Place], on_loss: Callable[[ExecutorFailed], None]
    ) -> None:
        self._cluster, self._on_loss = cluster, on_loss
        self._waiting = {ref: rank for rank, ref in enumerate(stays)}
        self._places = places
        self._over = threading.Event()
        self._thread = autostart.never_from(threading.Thread(target=self._run, name="pegboard-ray-watch", daemon=True))
        self._thread.start()

    def close(self) -> None:
        """From now on whatever ends was ended on purpose."""
        self._over.set()

    def join(self) -> None:
        """Wait for the thread, unless this is it. Soon over when the ranks have ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(3 * LOOK_SECONDS)

    def _run(self) -> None:
        while self._waiting:
            loss = self._look()
            if self._over.is_set():
                return
            if loss is not None:
                log.debug("%s", loss, exc_info=loss.__cause__)
                self._on_loss(loss)
                return

    def _look(self) -> ExecutorFailed | None:
        try:
            if not self._cluster.connected:
                return ExecutorFailed(_DISCONNECTED)
            done, _ = wait(list(self._waiting), LOOK_SECONDS, needed=1)
        except (Exception, SystemExit) as error:  # the latter from a Ray that is being shut down
            why = f"Ray no longer tells how the ranks are: {type(error).__name__}: {error}"
            failure = ExecutorFailed(why if self._cluster.connected else _DISCONNECTED)
            failure.__cause__ = error
            return failure
        return self._lost(self._waiting.pop(done[0]), done[0]) if done else None

    def _lost(self, rank: int, stay: Any) -> ExecutorFailed | None:
        try:
            with asking:
                how = ray.get(stay)
        except Exception as error:
            return lost(rank, self._places[rank], how_it_ended(error), error)
        return lost(rank, self._places[rank], how) if how else None  # without a reason it was shut down


def lost(rank: int, place: Place, how: str, cause: BaseException | None = None) -> ExecutorFailed:
    failure = ExecutorFailed(f"worker rank {rank} (process {place.pid} on {place.node}) {how}")
    failure.__cause__ = cause
    return failure
