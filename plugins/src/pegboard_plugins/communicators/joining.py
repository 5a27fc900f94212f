"""How the ranks of a group come to share one segment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from pegboard.contracts.communicator import CommunicatorError, CommunicatorTimeout, PeerLost
from pegboard_plugins.communicators.peers import Process
from pegboard_plugins.communicators.rendezvous import Meeting, Pauses, meet
from pegboard_plugins.communicators.segment import VERSION, Segment, new_file, open_file


def join(rank: int, world_size: int, group: str, rendezvous: str, timeout: float, slot_bytes: int) -> Segment:
    """Rank 0 makes the segment, the others open it; returns when all have. Raises ``CommunicatorError``."""
    who, deadline = f"group {group!r}, rank {rank}", time.monotonic() + timeout
    meeting = meet(rendezvous, group, timeout)
    if rank == 0:
        return _host(meeting, who, world_size, slot_bytes, deadline)
    return _visit(meeting, who, rank, world_size, slot_bytes, deadline)


def _host(meeting: Meeting, who: str, world_size: int, slot_bytes: int, deadline: float) -> Segment:
    file = new_file()
    try:
        segment = Segment(file, world_size, slot_bytes)
        words, ranks = segment.words, range(world_size)
        segment.enter(0, Process.current())
        meeting.offer(_record(world_size, slot_bytes) | {"process": Process.current(), "file": file})
        try:
            _until(lambda: all(words[segment.attached(r)] for r in ranks), segment, ranks, who, deadline)
        except BaseException:
            words[segment.left(0)] = 1
            raise
        finally:
            meeting.withdraw()
    finally:
        os.close(file)
    words[Segment.OPEN] = 1
    return segment


def _visit(meeting: Meeting, who: str, rank: int, world_size: int, slot_bytes: int, deadline: float) -> Segment:
    record = meeting.find(who, deadline)
    host, here = Process(*record["process"]), Process.current()
    if host.host != here.host:
        raise CommunicatorError(
            f"{who}: rank 0 runs on another host or in another container ({host.host}; here {here.host}), where no memory can be "
            f"shared; choose the communicator 'torch_distributed'"
        )
    wanted = _record(world_size, slot_bytes)
    if any(record[key] != value for key, value in wanted.items()):
        raise CommunicatorError(
            f"{who}: rank 0 has made the group with { {k: record[k] for k in wanted} }, this rank wants {wanted}"
        )
    file = open_file(host, record["file"])
    try:
        segment = Segment(file, world_size, slot_bytes)
    finally:
        os.close(file)
    segment.enter(rank, here)
    _until(lambda: bool(segment.words[Segment.OPEN]), segment, [0], who, deadline)
    return segment


def _record(world_size: int, slot_bytes: int) -> dict[str, Any]:
    return {"layout": VERSION, "world_size": world_size, "slot_bytes": slot_bytes}


def _until(ready: Callable[[], bool], segment: Segment, peers: Any, who: str, deadline: float) -> None:
    """Wait for ``peers`` to have come, or to go on."""
    words, pauses = segment.words, Pauses(deadline)
    while not ready():
        for peer in peers:
            if words[segment.attached(peer)] and (words[segment.left(peer)] or segment.process(peer).has_ended()):
                raise PeerLost(f"{who}: rank {peer} (process {segment.process(peer).pid}) has ended before all ranks had come")
        if pauses.over():
            missing = [r for r in range(segment.world_size) if not words[segment.attached(r)]]
            raise CommunicatorTimeout(f"{who}: not all ranks have come in time; missing are {missing}")
