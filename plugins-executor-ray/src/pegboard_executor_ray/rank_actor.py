"""RankActor: one rank, in the process of an actor."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from pegboard.contracts.executor import WorkerError
from pegboard.contracts.worker import Worker
from pegboard.wire import World
from pegboard_executor_mp import process
from pegboard_executor_mp.answering import Answering
from pegboard_executor_mp.fleet import has_ended
from pegboard_executor_mp.messages import Outcome, Reply, Request
from pegboard_executor_ray.environment import Surroundings
from pegboard_executor_ray.place import Place
from pegboard_executor_ray.rendezvous import Folder, Store

log = logging.getLogger(__name__)

Told = tuple[Any, tuple[Any, ...] | None]
"""A result, and None; or the arguments of a ``WorkerError``: exceptions themselves may not survive being sent."""
_LOOK_SECONDS: Final = 1.0
_ALONE_SECONDS: Final = 3.0
"""For a rank without a raylet to shut its worker down, and to be heard of."""


class RankActor:
    """A plain class, of which ``Crew`` makes an actor: ``stay`` then has a thread of its own, everything else is called one after
    the other. Nothing of a plugin, nor torch, is imported before ``enter``."""

    groups: ClassVar[Mapping[str, int]] = {}
    """More threads that methods of a subclass have, as Ray's concurrency groups: name, and how many."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._raylet = int(os.environ.get("RAY_RAYLET_PID", "0"))  # before the engine's variables come
        self._left = threading.Event()
        self._one = threading.Lock()
        self._worker: Worker | None = None
        self._answering: Answering | None = None
        self._rendezvous: Folder | Store | None = None
        self._calling: int | None = None
        """The thread that is in a call."""

    def __repr__(self) -> str:
        """Ray puts it before the lines that this process prints."""
        return f"rank {self.rank}"

    # -- starting, in this order -----------------------------------------------------------------------------------------

    def enter(self, surroundings: bytes) -> Told:
        """Look like the engine's process, except for what is this node's own. Returns the ``Place``."""

        def work() -> Place:
            process.send_output_to_stderr("")  # stdout belongs to the program that runs the engine; Ray says whose line it is
            told: Surroundings = pickle.loads(surroundings)
            process.set_up_logging(told.log_levels)
            _name_process(f"pegboard-rank{self.rank}")
            _end_by_sigterm()
            told.enter()
            return Place.here(rank=True)

        return self._telling(work)

    def open_rendezvous(self, one_node: bool) -> Told:
        """Returns the address, at which the ranks can meet for as long as this actor lives."""

        def work() -> str:
            self._rendezvous = Folder() if one_node else Store(Place.here(rank=True).node_ip)
            return self._rendezvous.address

        return self._telling(work)

    def set_up(self, composition: bytes, world: World, visible: tuple[str, ...]) -> Told:
        """Make the worker. ``visible``: the devices of all ranks on this node, by local rank; none on the processor."""

        def work() -> None:
            if visible:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            worker = pickle.loads(composition).create("worker", world=world)
            self._worker, self._answering = worker, Answering(self.rank, worker)

        return self._telling(work)

    def _telling(self, work: Callable[[], Any]) -> Told:
        try:
            return work(), None
        except BaseException as error:  # also SystemExit, which would end the actor without a word
            log.debug("rank %d could not start", self.rank, exc_info=True)
            return None, WorkerError.of(self.rank, error).__reduce__()[1]

    # -- while it runs ---------------------------------------------------------------------------------------------------

    def call(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        """A ``Request`` to its ``Reply``."""
        with self._one:
            if self._answering is None:
                gone = WorkerError(self.rank, "ExecutorFailed", "the rank was shut down")
                return tuple(Reply(request[0], Outcome.FAILED, gone.__reduce__()[1]))
            self._calling = threading.get_ident()
            try:
                return tuple(self._answering.reply(Request(*request)))
            finally:
                self._calling = None

    def where(self) -> str:
        """The stack of the call that is carried out, if any: where it hangs. For another thread than that of ``call``."""
        calling = self._calling
        frame = None if calling is None else sys._current_frames().get(calling)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        ours = max((number for number, entry in enumerate(stack) if entry.filename == __file__), default=-1)
        return "".join(traceback.format_list(stack[ours + 1 :]))

    def stay(self) -> str:
        """Returns when this rank was shut down, or why it cannot stay. Whoever waits for it hears of any other end as well.

        Ray itself ends actors only many seconds after their raylet was killed.
        """
        raylet = self._raylet
        watched = bool(raylet) and not has_ended(raylet)  # in a container of its own a rank may not see it
        while not self._left.wait(_LOOK_SECONDS):
            if watched and has_ended(raylet):
                threading.Thread(target=self._end_alone, name="pegboard-end", daemon=True).start()
                return f"is cut off: the raylet of its node (process {raylet}) has ended"
        return ""

    def _end_alone(self) -> None:
        """Nobody ends this process any more."""
        threading.Thread(target=self.shutdown, name="pegboard-shutdown", daemon=True).start()
        time.sleep(_ALONE_SECONDS)
        os._exit(1)

    def shutdown(self) -> None:
        """After the call that runs. Idempotent."""
        with self._one:
            worker, self._worker, self._answering = self._worker, None, None
            try:
                if worker is not None:
                    worker.shutdown()
            finally:
                rendezvous, self._rendezvous = self._rendezvous, None
                if rendezvous is not None:
                    rendezvous.close()
                self._left.set()


def _name_process(name: str) -> None:
    """What ``top`` shows: the name of the main thread, which this is not. The command line is Ray's."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _end_by_sigterm() -> None:
    """As a process does by default. Ray's handler is in Python, whose main thread is in native code of Ray's for good."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_DFL))
