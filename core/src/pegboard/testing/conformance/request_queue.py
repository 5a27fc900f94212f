"""Conformance of a RequestQueue. Subclass, give ``make``, and every invariant of the contract is tested."""

from __future__ import annotations

import abc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.contracts.request_queue import RequestQueue
from pegboard.contracts.views import RequestView
from pegboard.testing.conformance._views import QUICK, request_views, view


class RequestQueueConformance(abc.ABC):
    @abc.abstractmethod
    def make(self) -> RequestQueue:
        """A new, empty queue."""

    def filled(self, count: int = 5) -> RequestQueue:
        queue = self.make()
        for i in range(count):
            queue.add(view(f"r{i}", arrival_time=float(i), num_prompt_tokens=10 + i))
        return queue

    def test_an_empty_queue(self) -> None:
        queue = self.make()
        assert len(queue) == 0
        assert queue.peek() is None
        assert list(queue) == []
        assert queue.remove("nobody") is False
        with pytest.raises(IndexError):
            queue.pop()

    def test_pop_returns_what_peek_showed(self) -> None:
        queue = self.filled()
        for left in range(4, -1, -1):
            shown = queue.peek()
            assert shown is not None
            assert queue.pop() == shown
            assert len(queue) == left

    def test_iteration_is_in_service_order_and_changes_nothing(self) -> None:
        queue = self.filled()
        order = [v.request_id for v in queue]
        assert [v.request_id for v in queue] == order
        assert [queue.pop().request_id for _ in order] == order

    def test_an_id_is_held_once(self) -> None:
        queue = self.filled(2)
        with pytest.raises(ValueError, match="r1"):
            queue.add(view("r1"))
        assert sorted(v.request_id for v in queue) == ["r0", "r1"]

    def test_a_removed_request_is_gone_and_may_come_back(self) -> None:
        queue = self.filled()
        assert queue.remove("r2") is True
        assert queue.remove("r2") is False
        assert sorted(v.request_id for v in queue) == ["r0", "r1", "r3", "r4"]
        queue.add(view("r2"))
        assert len(queue) == 5
        assert sorted(queue.pop().request_id for _ in range(5)) == ["r0", "r1", "r2", "r3", "r4"]

    def test_a_popped_request_that_is_given_back_is_next_again(self) -> None:
        queue = self.filled()
        popped = queue.pop()
        queue.prepend(popped)
        assert queue.peek() == popped
        assert len(queue) == 5

    def test_nobody_is_lost_or_made_up(self) -> None:
        @QUICK
        @given(st.lists(st.tuples(st.sampled_from(("add", "prepend", "pop", "remove")), st.integers(0, 5)), max_size=40))
        def run(operations: list[tuple[str, int]]) -> None:
            queue, held = self.make(), set()
            for operation, number in operations:
                name = f"r{number}"
                if operation in ("add", "prepend") and name not in held:
                    getattr(queue, operation)(view(name, priority=number % 3, arrival_time=float(number)))
                    held.add(name)
                elif operation == "pop" and held:
                    held.remove(queue.pop().request_id)
                elif operation == "remove":
                    assert queue.remove(name) is (name in held)
                    held.discard(name)
                assert len(queue) == len(held)
                assert {v.request_id for v in queue} == held
                first = queue.peek()
                assert (first is None) == (not held)
                assert first is None or first == next(iter(queue))

        run()

    def test_equal_inputs_give_equal_order(self) -> None:
        @QUICK
        @given(st.lists(request_views(), max_size=20, unique_by=lambda v: v.request_id))
        def run(views: list[RequestView]) -> None:
            orders = []
            for _ in range(2):
                queue = self.make()
                for v in views:
                    queue.add(v)
                orders.append([queue.pop().request_id for _ in views])
            assert orders[0] == orders[1]

        run()
