"""The standard queues."""

from __future__ import annotations

from pegboard.contracts.request_queue import RequestQueue
from pegboard.contracts.views import RequestView
from pegboard.testing.conformance.request_queue import RequestQueueConformance
from pegboard_plugins.scheduling.queues import FCFSQueue, PriorityQueue


def ids(queue: RequestQueue) -> list[str]:
    return [view.request_id for view in queue]


class TestFCFSQueue(RequestQueueConformance):
    def make(self) -> FCFSQueue:
        return FCFSQueue()

    def test_order_of_arrival_whatever_the_requests_say(self) -> None:
        queue = self.make()
        for name, arrival, priority in (("a", 3.0, 5), ("b", 1.0, 0), ("c", 2.0, 9)):
            queue.add(RequestView(name, arrival, priority=priority))
        queue.prepend(RequestView("d", 4.0))
        assert ids(queue) == ["d", "a", "b", "c"]


class TestPriorityQueue(RequestQueueConformance):
    def make(self) -> PriorityQueue:
        return PriorityQueue()

    def test_smaller_priority_first_then_arrival(self) -> None:
        queue = self.make()
        for name, arrival, priority in (("a", 3.0, 5), ("b", 1.0, 5), ("c", 2.0, -1), ("d", 0.0, 9)):
            queue.add(RequestView(name, arrival, priority=priority))
        assert ids(queue) == ["c", "b", "a", "d"]

    def test_a_preempted_request_does_not_pass_a_more_urgent_one(self) -> None:
        queue = self.make()
        queue.add(RequestView("urgent", 5.0, priority=0))
        queue.prepend(RequestView("preempted", 1.0, priority=1))
        assert ids(queue) == ["urgent", "preempted"]

    def test_a_request_removed_and_added_again_is_not_found_twice(self) -> None:
        queue = self.make()
        queue.add(RequestView("a", 1.0, priority=1))
        queue.remove("a")
        queue.add(RequestView("a", 1.0, priority=7))
        queue.add(RequestView("b", 1.0, priority=3))
        assert ids(queue) == ["b", "a"]
        assert [queue.pop().priority, queue.pop().priority] == [3, 7]
