"""KVCacheManager: which blocks belong to which request. Bookkeeping only, no tensors."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

API: Final = 1

BlockIds = list[list[int]]
"""One list of block ids per KV-cache group."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Computed blocks found for a request, one list per group, and the tokens they hold. Places behind a group's window have the
    null block."""

    block_ids: BlockIds = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """Result of ``fork``: the child's blocks, and (source, destination) copies that a worker must make before it runs."""

    block_ids: BlockIds
    copies: list[tuple[int, int]]


class KVCacheManager(abc.ABC):
    """Block tables of all requests of one engine, over one ``KVAllocator``.

    Requests are known by id. Invariants: block tables only grow, except by ``free`` and ``swap_out``; a failed allocation
    changes nothing; a shared block is never written (``fork`` copies the last partial block); the last token of a prompt
    is never a hit, so that there is always something to compute logits from.

    A group with a *sliding window* of w keeps, for a request with n computed tokens, at least what the next token looks at: the
    last w - 1 of them. Places wholly before these are *behind the window*: ``release_passed`` gives their blocks up, and the null
    block takes their place in the table. They stay findable like those of a finished request, so a later prefix may end there.
    """

    @abc.abstractmethod
    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str | None = None) -> PrefixHit:
        """Longest cached prefix of ``token_ids``, at most ``len(token_ids) - 1`` tokens, in whole blocks."""

    @abc.abstractmethod
    def allocate_slots(
        self, request_id: str, num_tokens: int, hit: PrefixHit | None = None, reserve_blocks: int = 0, num_known: int = 0
    ) -> BlockIds | None:
        """Make room for ``num_tokens`` tokens in all (computed and to be computed next), and in groups without a window for
        ``num_known`` at once if that is more. ``hit`` is adopted on the first call. Returns the ids that are new to the block
        table (hits included), or None if they do not fit while ``reserve_blocks`` stay free."""

    @abc.abstractmethod
    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int, salt: str | None = None) -> None:
        """Full blocks below ``num_computed`` are computed: publish them for others."""

    @abc.abstractmethod
    def release_passed(self, request_id: str, num_computed: int) -> int:
        """No step to come, and none that still runs, computes a token of the request before ``num_computed``: give up the blocks
        behind the windows. Returns how many these were. Unknown ids are ignored."""

    @abc.abstractmethod
    def free(self, request_id: str) -> None:
        """Release everything the request holds, tail first. Unknown ids are ignored."""

    @abc.abstractmethod
    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> Fork | None:
        """Give ``child_id`` the parent's first ``num_tokens`` tokens: full blocks are shared, the last partial one is copied in
        every group. None, and nothing changed, without room for that, or where the parent has given up what the child's next
        token would look at."""

    @abc.abstractmethod
    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        """Move the request's blocks to the host: (device, host) pairs, or None without host room. Places behind a
        window are not moved and come back as such."""

    @abc.abstractmethod
    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        """Bring them back: (host, device) pairs, or None without device room."""

    @abc.abstractmethod
    def block_ids(self, request_id: str) -> BlockIds: ...

    @abc.abstractmethod
    def reset(self) -> bool: ...

    @abc.abstractmethod
    def check_integrity(self) -> None: ...
