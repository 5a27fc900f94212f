"""Collectives through shared memory, for ranks on one host.

A collective takes one meeting: every rank copies its part into its slot, announces it, waits until all have, and reads theirs.
The two slots of a rank are used in turn. A rank writes a slot again two collectives later, and has by then seen all others
announce the collective in between, which they do after they have read: one wait per collective is enough.

What cannot go through a slot at once goes in pieces. Messages between two ranks have slots and counts of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pegboard.contracts.communicator import Communicator, CommunicatorError
from pegboard_plugins.communicators import signatures
from pegboard_plugins.communicators.checks import check_group, check_peer
from pegboard_plugins.communicators.joining import join
from pegboard_plugins.communicators.signatures import ALL_GATHER, ALL_REDUCE, BARRIER, MESSAGE, SHARES
from pegboard_plugins.communicators.sums import Add, adder, check_summable
from pegboard_plugins.communicators.waiting import Waiter, unsupported

SLOT_BYTES = 1024 * 1024
"""Fewer pieces are fewer meetings; larger ones leave a core's caches before the others have read them."""
SHARING_RANKS, SHARING_BYTES = 3, 256 * 1024
"""From how many ranks and bytes on a sum is shared out: each rank adds up a part, at the price of a second meeting."""
_LARGEST_ELEMENT = 16
_MOST_VIEWS = 256
"""Shapes remembered; a forward has few, but prefills may have any number of tokens."""

_Parts = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Views:
    """How tensors of one shape and dtype lie in the slots: ``slots[turn][rank]``. ``add`` is None where there is no sum."""

    signature: int
    slots: tuple[_Parts, _Parts]
    add: Add | None
    shares: tuple[list[_Parts], list[_Parts]] | None
    """``shares[turn][rank]``: the slots' elements as one part for each rank, where adding is shared out."""


class SharedMemoryCommunicator(Communicator):
    """Further invariants: float16 and bfloat16 are summed in float32 in rank order and rounded once; a rank that does something
    else than the others is an error on all. Further argument: ``slot_bytes``, the size of a piece, equal on all ranks."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        group: str,
        rendezvous: str,
        device: torch.device,
        timeout: float,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        check_group(rank, world_size, group)
        reason = unsupported() or (f"is for tensors of the cpu, not of {device}" if device.type != "cpu" else None)
        if reason:
            raise ValueError(f"communicator 'shared_memory' {reason}; choose the communicator 'torch_distributed'")
        if slot_bytes < _LARGEST_ELEMENT or slot_bytes % _LARGEST_ELEMENT:
            raise ValueError(f"slot_bytes {slot_bytes} must be a positive multiple of {_LARGEST_ELEMENT}")
        self.rank, self.world_size = rank, world_size
        self._group, self._alone = group, world_size == 1
        self._refusal: CommunicatorError | None = None
        if self._alone:
            return
        self._slot_bytes = slot_bytes
        self._segment = segment = join(rank, world_size, group, rendezvous, timeout, slot_bytes)
        self._words = segment.words
        self._waiter = Waiter(segment, rank, group, timeout)
        self._turn = 0
        self._peers = [r for r in range(world_size) if r != rank]
        self._own, self._posted = segment.posted(rank), [segment.posted(r) for r in self._peers]
        self._views: dict[tuple[torch.Size, torch.dtype], _Views | None] = {}

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place."""
        if self._alone:
            return tensor
        views = self._find_views(tensor)
        if views is None:
            return self._all_reduce_pieces(tensor)
        if (add := views.add) is None:
            check_summable(tensor.dtype)
            return tensor
        try:
            slots = views.slots[self._turn + 1 & 1]
            slots[self.rank].copy_(tensor)
            self._meet(views.signature | ALL_REDUCE)
            if views.shares:
                self._add_shares(views.shares, add, tensor)
            else:
                add(slots, tensor)
        except BaseException as error:
            self._fail(error)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self._alone:
            return tensor
        if tensor.dim() == 0:
            tensor = tensor.reshape(1)
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"all_gather along dimension {dim} of a tensor of shape {list(tensor.shape)}")
        dim %= tensor.dim()
        views = self._find_views(tensor)
        if views is None:
            return self._all_gather_pieces(tensor, dim)
        return self._gather(views, tensor, dim, lambda slots: torch.cat(slots, dim))

    def barrier(self) -> None:
        if self._alone:
            return
        self._check_open()
        try:
            self._meet(BARRIER)
        except BaseException as error:
            self._fail(error)

    def _meet(self, signature: int) -> None:
        """Announce this rank's part of a collective, and wait for the others'."""
        self._turn = turn = self._turn + 1
        words, offset = self._words, 1 + (turn & 1)
        words[self._own + offset] = signature
        self._waiter.announce(self._own, turn)
        self._waiter.wait(self._peers, self._posted, turn, lambda: signatures.describe(signature))
        for peer, posted in zip(self._peers, self._posted, strict=True):
            if words[posted + offset] != signature:
                self._disagree(peer, signature, words[posted + offset])

    def _gather(self, views: _Views, tensor: torch.Tensor, dim: int, read: Callable[[list[torch.Tensor]], Any]) -> Any:
        try:
            slots = views.slots[self._turn + 1 & 1]
            slots[self.rank].copy_(tensor)
            self._meet(views.signature | ALL_GATHER | signatures.along(dim))
            return read(slots)
        except BaseException as error:
            self._fail(error)

    def _add_shares(self, shares: tuple[list[_Parts], list[_Parts]], add: Add, tensor: torch.Tensor) -> None:
        """Every rank adds up its share of the elements, and in a second meeting they exchange what they got."""
        parts, results = shares[self._turn & 1], shares[self._turn + 1 & 1]
        add([part[self.rank] for part in parts], results[self.rank][self.rank])
        self._meet(SHARES)
        whole = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        torch.cat([result[rank] for rank, result in enumerate(results)], out=whole.view(-1))
        if whole is not tensor:
            tensor.copy_(whole)

    def _all_reduce_pieces(self, tensor: torch.Tensor) -> torch.Tensor:
        check_summable(tensor.dtype)
        flat = tensor.contiguous().view(-1)
        for piece in self._pieces(flat):
            self.all_reduce(piece)
        return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))

    def _all_gather_pieces(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """As rows of what lies behind ``dim`` and before it: whole rows where they fit, or parts of one."""
        shape = tensor.shape
        rows, width = math.prod(shape[:dim]), math.prod(shape[dim:])
        source = tensor.reshape(rows, width)
        result = tensor.new_empty(rows, self.world_size, width)
        for row, column in _blocks(rows, width, self._slot_bytes // tensor.element_size()):
            block = source[row, column]
            into = result[row, :, column]
            views = self._find_views(block)
            assert views is not None, "a block fits into a slot"

            def read(slots: list[torch.Tensor], into: torch.Tensor = into) -> None:
                for rank, slot in enumerate(slots):
                    into[:, rank].copy_(slot)

            self._gather(views, block, dim, read)
        return result.view(*shape[:dim], self.world_size * shape[dim], *shape[dim + 1 :])

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Up to two pieces are sent ahead of the receiver."""
        check_peer(to, self.rank, self.world_size, "send")
        self._check_open(tensor)
        segment, words, waiter = self._segment, self._words, self._waiter
        sent, taken = segment.sent(self.rank, to), segment.taken(to, self.rank)
        try:
            for piece in self._pieces(tensor.reshape(-1)):
                count = words[sent] + 1
                waiter.wait((to,), (taken,), max(0, count - 2), lambda: f"send to rank {to}")
                self._box(self.rank, to, count, piece).copy_(piece)
                words[sent + 1 + (count & 1)] = signatures.contents(piece) | MESSAGE
                waiter.announce(sent, count, to)
        except BaseException as error:
            self._fail(error)

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        check_peer(source, self.rank, self.world_size, "recv")
        self._check_open(tensor)
        segment, words, waiter = self._segment, self._words, self._waiter
        sent, taken = segment.sent(source, self.rank), segment.taken(self.rank, source)
        into = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        try:
            for piece in self._pieces(into.view(-1)):
                count = words[taken] + 1
                waiter.wait((source,), (sent,), count, lambda: f"recv from rank {source}")
                wanted, found = signatures.contents(piece) | MESSAGE, words[sent + 1 + (count & 1)]
                if found != wanted:
                    self._disagree(source, wanted, found)
                piece.copy_(self._box(source, self.rank, count, piece))
                waiter.announce(taken, count, source)
        except BaseException as error:
            self._fail(error)
        return tensor if into is tensor else tensor.copy_(into)

    def _pieces(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """As few as possible, of about equal size."""
        size = flat.numel() * flat.element_size()
        return flat.tensor_split(-(-size // self._slot_bytes)) if size else ()

    def _box(self, source: int, to: int, count: int, piece: torch.Tensor) -> torch.Tensor:
        box = self._segment.mailbox(source, to, count & 1)
        return box[: piece.numel() * piece.element_size()].view(piece.dtype)

    # -- views, errors, the end --------------------------------------------------------------------------------------

    def _find_views(self, tensor: torch.Tensor) -> _Views | None:
        """None: goes in pieces."""
        if self._refusal is not None or not tensor.is_cpu:
            self._check_open(tensor)
        key = (tensor.shape, tensor.dtype)
        if key in self._views:
            return self._views[key]
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        views = self._views[key] = self._make_views(tensor)
        return views

    @torch.inference_mode(False)  # what is made in inference mode could only be written to in that mode
    def _make_views(self, tensor: torch.Tensor) -> _Views | None:
        size = tensor.numel() * tensor.element_size()
        signature = signatures.contents(tensor)
        if size > self._slot_bytes:
            return None

        def flat(turn: int) -> _Parts:
            slots = (self._segment.slot(rank, turn) for rank in range(self.world_size))
            return [slot[:size].view(tensor.dtype) for slot in slots]

        def whole(turn: int) -> _Parts:
            return [slot.view(tensor.shape) for slot in flat(turn)]

        def shared(turn: int) -> list[_Parts]:
            return [list(slot.tensor_split(self.world_size)) for slot in flat(turn)]

        shares = (shared(0), shared(1)) if self.world_size >= SHARING_RANKS and size >= SHARING_BYTES else None
        return _Views(signature, (whole(0), whole(1)), adder(tensor.dtype, self.world_size), shares)

    def _check_open(self, tensor: torch.Tensor | None = None) -> None:
        if self._refusal is not None:
            raise self._again()
        if tensor is not None and not tensor.is_cpu:
            raise ValueError(f"group {self._group!r}: a tensor of {tensor.device} in a communicator of the cpu")

    def _disagree(self, peer: int, own: int, other: int) -> NoReturn:
        mine, theirs = signatures.describe(own), signatures.describe(other)
        raise CommunicatorError(f"group {self._group!r}: rank {self.rank} is at {mine}, but rank {peer} at {theirs}")

    def _fail(self, error: BaseException) -> NoReturn:
        """In the middle of an operation nobody can say what the others have read: the group is lost, and all are told."""
        same = isinstance(error, CommunicatorError)
        if self._refusal is not None and not same:  # closed meanwhile, from another thread
            raise self._again() from error
        if self._refusal is not None:
            raise error
        who = f"group {self._group!r}, rank {self.rank}"
        self._refusal = type(error)(str(error)) if same else CommunicatorError(f"{who}: has failed before: {error!r}")
        self._waiter.stop()
        raise error

    def _again(self) -> CommunicatorError:
        assert self._refusal is not None
        return type(self._refusal)(str(self._refusal))

    def close(self) -> None:
        """From any thread; an operation that is waiting ends with an error. The memory goes when nobody uses it."""
        if self._refusal is None:
            self._refusal = CommunicatorError(f"group {self._group!r}, rank {self.rank}: closed")
            if not self._alone:
                self._waiter.stop()
        if hasattr(self, "_segment"):
            self._views = {}
            del self._segment, self._words, self._waiter


def _blocks(rows: int, width: int, room: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of at most ``room`` elements that cover rows x width."""
    if width <= room:
        step = room // width
        for start in range(0, rows, step):
            yield slice(start, start + step), slice(None)
        return
    for row in range(rows):
        for start in range(0, width, room):
            yield slice(row, row + 1), slice(start, start + room)
