"""Checks of arguments that all communicators share."""

from __future__ import annotations


def check_group(rank: int, world_size: int, group: str) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"group {group!r}: rank {rank} of {world_size} ranks; the first is 0")


def check_peer(peer: int, rank: int, world_size: int, operation: str) -> None:
    if not 0 <= peer < world_size or peer == rank:
        others = ", ".join(str(r) for r in range(world_size) if r != rank) or "none"
        raise ValueError(f"{operation}: rank {peer} is no other rank of the group; rank {rank} can reach {others}")
