"""The longest cached prefix that serves all KV-cache groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.contracts.kv_cache_manager import BlockIds
from pegboard_plugins.kv.prefix_hash import group_keys
from pegboard_plugins.kv.table import first_seen

Lookup = Callable[[Sequence[bytes]], list[int]]


def longest_prefix(keys: Sequence[bytes], windows: Sequence[int | None], block_size: int, lookup: Lookup) -> BlockIds:
    """Blocks of each group, all equally many. A group without a window must have all of them; one with a window those that
    the token after the prefix looks at, and has null blocks before."""
    whole = {group: lookup(group_keys(keys, group)) for group, window in enumerate(windows) if window is None}
    length = min([len(blocks) for blocks in whole.values()], default=len(keys))
    ends = {
        g: _WindowEnd(group_keys(keys, g), window, block_size, lookup) for g, window in enumerate(windows) if window is not None
    }
    before = -1
    while ends and length != before:  # each group may find a shorter one, which the others then have to have too
        before = length
        for end in ends.values():
            length = end.longest(length)
    return [ends[g].blocks(length) if g in ends else whole[g][:length] for g in range(len(windows))]


class _WindowEnd:
    """Looks keys of one group up one by one, from the end of a prefix backwards, and each once."""

    def __init__(self, keys: Sequence[bytes], window: int, block_size: int, lookup: Lookup) -> None:
        self._keys, self._window, self._block_size, self._lookup = keys, window, block_size, lookup
        self._found: dict[int, int] = {}

    def longest(self, limit: int) -> int:
        """The longest prefix of up to ``limit`` places whose end the cache has."""
        length, place = limit, limit - 1
        while place >= first_seen(length * self._block_size, self._window, self._block_size):
            if self._block(place) == NULL_BLOCK:
                length = place
            place -= 1
        return length

    def blocks(self, length: int) -> list[int]:
        first = first_seen(length * self._block_size, self._window, self._block_size)
        return [NULL_BLOCK] * first + [self._block(place) for place in range(first, length)]

    def _block(self, place: int) -> int:
        if place not in self._found:
            found = self._lookup(self._keys[place : place + 1])
            self._found[place] = found[0] if found else NULL_BLOCK
        return self._found[place]
