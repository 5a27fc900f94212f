"""Memory of this process and of the host, and how much of it the KV cache may have. Bytes throughout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

from pegboard.config import KVCacheSettings, SchedulerConfig
from pegboard.engine.kv_groups import block_bytes, group_layers
from pegboard.wire import KVCacheSpec
from pegboard.wire.kv_cache import blocks_needed

DEFAULT_CPU_BUDGET = 512 << 20
"""Most that a KV cache takes on a CPU when nothing is said, unless one full-length request needs more."""

_UNLIMITED = 1 << 60
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def resident() -> int:
    """Resident memory of this process; its peak where the system tells no more."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident()


def peak_resident() -> int:
    """Peak of ``resident`` since the process started, or since ``reset_peak``."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def reset_peak() -> None:
    """Start ``peak_resident`` anew where the system can (Linux: clear_refs of proc(5)); elsewhere it is too high, not too low."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def trim_heap() -> None:
    """Give freed pages back to the system (glibc; elsewhere nothing happens). Loading and measuring leave much of them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_pages() -> None:
    """Have malloc keep freed memory for the next step (glibc; elsewhere nothing happens).

    By default it returns large pieces to the system at once and gets them back, page fault by page fault, in every layer:
    measured at about a fifth of a second for a prefill of 4096 tokens of a 135M model. ``trim_heap`` still empties it.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def host_memory() -> tuple[int, int]:
    """(free, total) of the host, or of the container this process runs in."""
    free = total = _UNLIMITED
    with contextlib.suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    if total == _UNLIMITED:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2  # unknown: do not count on more
    for folder, limit_name, used_name in (
        (_CGROUP_V2, "memory.max", "memory.current"),
        (_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < total:
            free, total = min(free, max(0, limit - used + _reclaimable(folder))), limit
    return free, total


def kv_budget(
    settings: KVCacheSettings,
    specs: dict[str, KVCacheSpec],
    free: int,
    limits: SchedulerConfig,
    max_model_len: int,
    booked: int,
) -> tuple[int, str]:
    """Bytes for the KV cache on a host whose ``free`` memory is known, and one line that says how they were found.

    ``kv_cache.memory`` if stated. Otherwise the least of: ``memory_fraction`` of what is free, less what extensions and graphs
    have ``booked``; what ``max_num_seqs`` requests of ``max_model_len`` tokens could fill; and ``DEFAULT_CPU_BUDGET``, or one
    request of ``max_model_len`` tokens where that is more. Memory is committed only as blocks are first used.
    """
    if settings.memory is not None:
        return settings.memory, f"kv_cache.memory={settings.memory}"
    groups = group_layers([specs], max_model_len)
    per_block, windows = block_bytes(groups, specs), [group.spec.sliding_window for group in groups]
    blocks = blocks_needed(max_model_len, windows, settings.block_size, min(limits.max_num_batched_tokens, max_model_len))
    one_request = (blocks + 1) * per_block  # and the null block
    everything = (blocks * limits.max_num_seqs + 1) * per_block
    share = max(0, int(settings.memory_fraction * free) - booked)
    cap = max(DEFAULT_CPU_BUDGET, one_request)
    return min(
        (
            share,
            f"kv_cache.memory_fraction={settings.memory_fraction} of {free} free bytes, "
            f"less {booked} booked by extensions and graphs",
        ),
        (everything, f"all that {limits.max_num_seqs} requests of {max_model_len} tokens can fill"),
        (cap, "the default for a CPU; kv_cache.memory sets another"),
    )


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None


def _reclaimable(folder: Path) -> int:
    """Page cache that a cgroup counts as used but gives back when asked."""
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0
