"""A rank's process, from its start to its end.

python -m pegboard_executor_mp.rank RANK PARENT PLAN HELLO LINE    (where ranks are spawned; the last three: file descriptors)
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
from typing import Any

from pegboard.contracts.executor import WorkerError
from pegboard_executor_mp import process
from pegboard_executor_mp.cores import num_cores
from pegboard_executor_mp.queue import MessageQueue, attach
from pegboard_executor_mp.serving import Serving, Terminated
from pegboard_executor_mp.start_plan import Boot, Hello, StartPlan, load

log = logging.getLogger(__name__)


def run(rank: int, plan: StartPlan, *, parent: int, hello: int, line: int) -> int:
    """Returns the exit status. A SIGTERM ends the call that runs, then the process, by that signal. ``line`` ends when this rank
    is to end: after the call that runs."""
    process.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that holds the engine
    serving = Serving(rank)
    signal.signal(signal.SIGTERM, serving.on_term)
    process.send_output_to_stderr(f"[rank {rank}] ")
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.register(signal.SIGTERM, 2, chain=True)
    threading.Thread(target=_listen, args=(line, serving), name="pegboard-mp-line", daemon=True).start()
    try:
        return _work(rank, plan, hello, serving)
    except Terminated:
        return 1
    finally:
        _leave(serving)


def _work(rank: int, plan: StartPlan, hello: int, serving: Serving) -> int:
    try:
        boot: Boot = load(plan.boot)
        process.set_up_logging(boot.log_levels)
        world = boot.worlds[rank]
        process.set_title(f"pegboard-rank{rank}", f"pegboard: rank {rank} of {world.size}")
        if plan.cores is not None:
            _bind(plan.cores[rank])
        composition = pickle.loads(boot.composition)
        requests = attach(boot.handles[rank])
        setting = "plugins.executor_mp.chunk_bytes or num_chunks"
        replies = MessageQueue.create(1, chunk_bytes=boot.chunk_bytes, num_chunks=boot.num_chunks, setting=setting)
        serving.set_up(composition.create("worker", world=world), requests, replies)
        greeting = Hello(replies=replies.handle(0))
    except BaseException as error:
        if serving.terminated:  # whatever somebody has made of that
            return 1
        log.debug("rank %d could not start", rank, exc_info=True)
        _say(hello, Hello(error=WorkerError.of(rank, error).__reduce__()[1]))
        return 1
    _say(hello, greeting)
    serving.run()
    return 0


def _bind(processors: frozenset[int]) -> None:
    os.sched_setaffinity(0, processors)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_cores(processors)))  # for whoever counts threads per process


def _say(hello: int, what: Hello) -> None:
    with contextlib.suppress(OSError), os.fdopen(hello, "wb") as pipe:
        pipe.write(what.packed())


def _listen(line: int, serving: Serving) -> None:
    os.read(line, 1)
    serving.stop()


def _leave(serving: Serving) -> None:
    """Everything that may fail or hang: whoever started us does not wait for ever."""
    steps: list[tuple[str, Any]] = [
        ("shutting down the worker", serving.close),
        ("functions that run at exit", atexit._run_exitfuncs),
        ("flushing what was printed", sys.stderr.flush),
    ]
    for what, step in steps:
        try:
            step()
        except BaseException:
            log.exception("%s failed", what)
    if serving.terminated:
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    rank, parent, plan_fd, hello, line = map(int, sys.argv[1:6])
    plan: StartPlan = load(plan_fd)
    plan.enter()
    os._exit(run(rank, plan, parent=parent, hello=hello, line=line))


if __name__ == "__main__":
    main()
