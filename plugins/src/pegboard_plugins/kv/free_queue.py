"""The queue of free blocks: a doubly linked list inside two arrays, so that any block leaves it in constant time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_ABSENT = -1


class FreeQueue:
    """Block ids in the order in which they will be handed out. Ids are ``0 … capacity - 1``; each is held at most once.

    ``_next[b]`` and ``_previous[b]`` are the neighbours of block ``b``. Entry ``capacity`` is the sentinel: its next is the
    head, its previous is the tail, so that no operation needs a case for an empty list or an end.
    """

    __slots__ = ("_next", "_previous", "_sentinel", "_size")

    def __init__(self, capacity: int, block_ids: Iterable[int] = ()) -> None:
        self._sentinel = capacity
        self._next = [_ABSENT] * capacity + [capacity]
        self._previous = [_ABSENT] * capacity + [capacity]
        self._size = 0
        self.extend(block_ids)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block_id: int) -> bool:
        return 0 <= block_id < self._sentinel and self._next[block_id] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            yield block_id
            block_id = self._next[block_id]

    def extend(self, block_ids: Iterable[int]) -> None:
        """Put blocks at the back: handed out last, the first of them earliest."""
        following, previous, sentinel = self._next, self._previous, self._sentinel
        tail = previous[sentinel]
        for block_id in block_ids:
            following[tail], previous[block_id] = block_id, tail
            tail = block_id
            self._size += 1
        following[tail], previous[sentinel] = sentinel, tail

    def extend_front(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the front: handed out first, in the given order."""
        following, previous, sentinel = self._next, self._previous, self._sentinel
        head = following[sentinel]
        for block_id in reversed(block_ids):
            following[block_id], previous[head] = head, block_id
            head = block_id
        following[sentinel], previous[head] = head, sentinel
        self._size += len(block_ids)

    def take(self, n: int) -> list[int]:
        """Take ``n`` blocks from the front. The caller has made sure that there are as many."""
        assert n <= self._size
        following, previous, sentinel = self._next, self._previous, self._sentinel
        taken = []
        block_id = following[sentinel]
        for _ in range(n):
            taken.append(block_id)
            after = following[block_id]
            following[block_id] = previous[block_id] = _ABSENT
            block_id = after
        following[sentinel], previous[block_id] = block_id, sentinel
        self._size -= n
        return taken

    def remove(self, block_id: int) -> None:
        """Take one block out of the middle. It must be here."""
        before, after = self._previous[block_id], self._next[block_id]
        assert after != _ABSENT, f"block {block_id} is not in the free queue"
        self._next[before], self._previous[after] = after, before
        self._next[block_id] = self._previous[block_id] = _ABSENT
        self._size -= 1

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the links do not form one list of ``len(self)`` blocks in both directions."""
        forward = list(self)
        assert len(forward) == len(set(forward)) == self._size, "free queue: a block twice, or a wrong size"
        backward: list[int] = []
        block_id = self._previous[self._sentinel]
        while block_id != self._sentinel and len(backward) <= self._size:
            backward.append(block_id)
            block_id = self._previous[block_id]
        assert backward == forward[::-1], "free queue: the two directions differ"
        linked = sum(link != _ABSENT for link in self._next[:-1])
        assert linked == self._size, "free queue: a block outside the list has links"
