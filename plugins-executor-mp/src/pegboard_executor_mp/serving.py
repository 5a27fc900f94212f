"""A rank's loop: takes requests, has its worker carry them out one after the other, sends replies."""

from __future__ import annotations

from pegboard.contracts.transport import Closed, Reader, Writer
from pegboard.contracts.worker import Worker
from pegboard_executor_mp.answering import Answering
from pegboard_executor_mp.messages import Request


class Terminated(BaseException):
    """SIGTERM came."""


class Serving:
    """``run`` is the process's main thread, in which worker and plugins are called."""

    def __init__(self, rank: int) -> None:
        self.terminated = False
        self._rank = rank
        self._stopping = False
        self._worker: Worker | None = None
        self._requests: Reader | None = None
        self._replies: Writer | None = None
        self._answering: Answering | None = None

    def set_up(self, worker: Worker, requests: Reader, replies: Writer) -> None:
        self._worker, self._requests, self._replies = worker, requests, replies
        self._answering = Answering(self._rank, worker, passing=(Terminated,))
        if self._stopping:
            requests.cancel()

    def stop(self) -> None:
        """From any thread: end after the call that runs."""
        self._stopping = True
        if self._requests is not None:
            self._requests.cancel()

    def on_term(self, *_: object) -> None:
        """The handler of SIGTERM. Raises only once, so that cleaning up is not cut short."""
        first, self.terminated, self._stopping = not self.terminated, True, True
        if first:
            raise Terminated

    def run(self) -> None:
        assert self._requests is not None
        try:
            while not self._stopping:
                self._serve(Request(*self._requests.get()))
        except Closed:
            pass  # the engine's process has closed the queue, or is gone

    def close(self) -> None:
        """Leave the queues, which tells the engine's process that no reply will come, then shut the worker down if there is one:
        that may hang."""
        worker, self._worker = self._worker, None
        try:
            for end in (self._requests, self._replies):
                if end is not None:
                    end.close()
        finally:
            if worker is not None:
                worker.shutdown()

    # -- one call ------------------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        if request.ranks is not None and self._rank not in request.ranks:
            return
        assert self._replies is not None
        assert self._answering is not None
        reply = self._answering.reply(request)
        if not self.terminated:  # else whatever the call has made of that is no answer
            self._replies.put(tuple(reply))
