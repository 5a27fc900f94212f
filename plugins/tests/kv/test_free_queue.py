"""The intrusive free queue against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pegboard.testing.conformance._views import QUICK
from pegboard_plugins.kv.free_queue import FreeQueue


def test_order_of_both_ends() -> None:
    queue = FreeQueue(8, [3, 1])
    queue.extend([5, 2])
    queue.extend_front([7, 0])
    assert list(queue) == [7, 0, 3, 1, 5, 2]
    assert queue.take(2) == [7, 0]
    queue.remove(1)
    assert list(queue) == [3, 5, 2]
    assert 1 not in queue
    assert 3 in queue
    assert queue.take(3) == [3, 5, 2]
    assert len(queue) == 0
    queue.check_integrity()


@QUICK
@given(
    st.lists(st.tuples(st.sampled_from(("back", "front", "take", "remove")), st.integers(0, 7), st.integers(0, 3)), max_size=60)
)
def test_against_a_list(operations: list[tuple[str, int, int]]) -> None:
    queue, model = FreeQueue(8), []
    for operation, block, count in operations:
        if operation in ("back", "front"):
            outside = [b for b in range(block, 8) if b not in model][:count]
            if operation == "back":
                queue.extend(outside)
                model += outside
            else:
                queue.extend_front(outside)
                model = outside + model
        elif operation == "take" and count <= len(model):
            assert queue.take(count) == model[:count]
            model = model[count:]
        elif operation == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        queue.check_integrity()
        assert list(queue) == model
        assert len(queue) == len(model)
        assert [b for b in range(8) if b in queue] == sorted(model)
