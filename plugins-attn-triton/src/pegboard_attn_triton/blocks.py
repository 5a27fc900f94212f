"""Moving whole blocks: forks within a cache, swaps between device and host."""

from __future__ import annotations

import torch

from pegboard_attn_triton import launch


def overlap(pairs: torch.Tensor) -> bool:
    """Whether some target is also a source. ``pairs`` [N, 2] on the host; on a device it is taken for granted, since looking
    would wait for it."""
    if pairs.device.type != "cpu":
        return True
    sources, targets = pairs.unbind(1)
    return bool(torch.isin(targets, sources).any())


def move(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> bool:
    """Copy blocks with one kernel, which reaches pinned memory of the host too. False where it cannot: nothing is moved."""
    sides = (source, target)
    reachable = all(side.is_contiguous() for side in sides)
    if any(side.device.type == "cuda" for side in sides):  # otherwise interpreted
        reachable = reachable and all(side.device.type == "cuda" or side.is_pinned() for side in sides)
    same = source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    if not reachable or source[0].nbytes % 4 or (same and overlap(pairs)):
        return False
    device = source.device if source.device.type == "cuda" else target.device
    launch.copy_blocks(source, target, send_pairs(pairs, device)).run()
    return True


def send_pairs(pairs: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[N, 2] int64 on the device, without waiting for it."""
    if pairs.device.type == "cpu" and device.type == "cuda":
        pairs = pairs.pin_memory()
    return pairs.to(device, non_blocking=True).contiguous()
