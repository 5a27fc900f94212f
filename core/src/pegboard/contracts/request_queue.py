"""RequestQueue: the order in which waiting requests are admitted."""

from __future__ import annotations

import abc
import heapq
import itertools
from collections.abc import Iterator
from typing import Any, Final

from pegboard.contracts.views import RequestView

API: Final = 1


class RequestQueue(abc.ABC):
    """Waiting requests in order of service. Holds views; never changes a request.

    Invariants: each id is held at most once; ``pop`` returns what ``peek`` showed; iteration is in service order and
    changes nothing; ``prepend`` (used for preempted requests) makes a request the next one unless the queue's own order
    says otherwise; equal inputs give equal order.
    """

    @abc.abstractmethod
    def add(self, request: RequestView) -> None:
        """Enqueue a new request. Raises ``ValueError`` if its id is held already."""

    @abc.abstractmethod
    def prepend(self, request: RequestView) -> None:
        """Give back a request that was running or had been popped."""

    @abc.abstractmethod
    def peek(self) -> RequestView | None: ...

    @abc.abstractmethod
    def pop(self) -> RequestView:
        """Take the next request. Raises ``IndexError`` when empty."""

    @abc.abstractmethod
    def remove(self, request_id: str) -> bool:
        """Take out one request; False if it is not here."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __iter__(self) -> Iterator[RequestView]: ...


class KeyedRequestQueue(RequestQueue):
    """A queue ordered by ``key(request)``, smallest first; ties in order of arrival at the queue. Subclass and give ``key``."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, RequestView]] = []
        self._entries: dict[str, int] = {}
        self._back = itertools.count()
        self._front = itertools.count(-1, -1)

    @abc.abstractmethod
    def key(self, request: RequestView) -> Any:
        """A sortable value. Must depend on the view only."""

    def add(self, request: RequestView) -> None:
        self._push(request, next(self._back))

    def prepend(self, request: RequestView) -> None:
        self._push(request, next(self._front))

    def _push(self, request: RequestView, place: int) -> None:
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id!r} is already queued")
        self._entries[request.request_id] = place
        heapq.heappush(self._heap, (self.key(request), place, request))

    def _drop_removed(self) -> None:
        while self._heap and self._entries.get(self._heap[0][2].request_id) != self._heap[0][1]:
            heapq.heappop(self._heap)

    def peek(self) -> RequestView | None:
        self._drop_removed()
        return self._heap[0][2] if self._heap else None

    def pop(self) -> RequestView:
        self._drop_removed()
        if not self._heap:
            raise IndexError("pop from an empty request queue")
        request = heapq.heappop(self._heap)[2]
        del self._entries[request.request_id]
        return request

    def remove(self, request_id: str) -> bool:
        removed = self._entries.pop(request_id, None) is not None
        if len(self._heap) > 2 * len(self._entries) + 16:  # removed entries stay in the heap until they come up
            self._heap = [e for e in self._heap if self._entries.get(e[2].request_id) == e[1]]
            heapq.heapify(self._heap)
        return removed

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestView]:
        return (r for _, place, r in sorted(self._heap, key=lambda e: e[:2]) if self._entries.get(r.request_id) == place)
