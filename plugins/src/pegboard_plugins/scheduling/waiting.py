"""WaitingRequests: the scheduler's own book of waiting requests, in the order that a RequestQueue gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pegboard.contracts.request_queue import RequestQueue
from pegboard.contracts.views import RequestView
from pegboard_plugins.scheduling.policy_guard import PolicyGuard
from pegboard_plugins.scheduling.queues import FCFSQueue
from pegboard_plugins.scheduling.request import Request


class WaitingRequests:
    """The queue decides the order, the book decides who is there. A queue that raises, loses a request or makes one up is
    replaced by first come, first served, so that no request is lost with it."""

    def __init__(self, queue: RequestQueue, guard: PolicyGuard) -> None:
        self._queue, self._guard = queue, guard
        self._book: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._book)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._book.values())

    def add(self, request: Request) -> None:
        self._enter(request, self._queue.add)

    def prepend(self, request: Request) -> None:
        self._enter(request, self._queue.prepend)

    def peek(self) -> Request | None:
        """The next request; None when nobody waits."""
        if not self._book:
            return None
        for _ in range(2):
            view = self._guard.ask(self._queue, self._queue.peek, default=None)
            request = self._book.get(view.request_id) if isinstance(view, RequestView) else None
            if request is not None:
                return request
            self._replace(f"peek showed {view!r}, with {len(self._book)} requests waiting")
        raise AssertionError("the first-come-first-served queue lost a request")

    def take(self, request: Request) -> None:
        """Take out a request that is about to run: by ``pop`` if it is the next one, as queues that count service expect."""
        if self.peek() is not request:
            self.remove(request)
            return
        view = self._guard.ask(self._queue, self._queue.pop, default=None)
        del self._book[request.request_id]
        if not isinstance(view, RequestView) or view.request_id != request.request_id:
            self._replace(f"pop returned {view!r}, not the request {request.request_id!r} that peek showed")

    def remove(self, request: Request) -> None:
        removed = self._guard.ask(self._queue, self._queue.remove, request.request_id, default=None)
        del self._book[request.request_id]
        if removed is not True:
            self._replace(f"remove({request.request_id!r}) returned {removed!r} for a request that waits")

    def _enter(self, request: Request, enter: Callable[[RequestView], object]) -> None:
        self._book[request.request_id] = request
        failed = object()
        if self._guard.ask(self._queue, enter, request.view(), default=failed) is failed:
            self._replace(f"it did not take request {request.request_id!r}")

    def _replace(self, reason: str) -> None:
        if self._guard.strict:
            raise RuntimeError(f"request queue {type(self._queue).__qualname__}: {reason}")
        self._guard.report(self._queue, reason)
        self._queue = FCFSQueue()
        for request in sorted(self._book.values(), key=lambda request: request.arrival):
            self._queue.add(request.view())
