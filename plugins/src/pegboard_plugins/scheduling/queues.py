"""Request queues: first come first served, and by priority."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pegboard.contracts.request_queue import KeyedRequestQueue, RequestQueue
from pegboard.contracts.views import RequestView


class FCFSQueue(RequestQueue):
    """First come, first served; what is given back goes to the front. Every operation takes constant time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RequestView] = OrderedDict()

    def add(self, request: RequestView) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is already queued")
        self._requests[request.request_id] = request

    def prepend(self, request: RequestView) -> None:
        self.add(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> RequestView | None:
        return next(iter(self._requests.values()), None)

    def pop(self) -> RequestView:
        if not self._requests:
            raise IndexError("pop from an empty request queue")
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> bool:
        return self._requests.pop(request_id, None) is not None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._requests.values())


class PriorityQueue(KeyedRequestQueue):
    """Smaller ``priority`` first; among equals the one that arrived first. A preempted request keeps its place by both."""

    def key(self, request: RequestView) -> tuple[int, float]:
        return request.priority, request.arrival_time
