"""How many compute threads a worker gets."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(_CGROUP_QUOTA)
    return cores if quota is None else max(1, min(cores, quota))


def threads_per_worker(configured: int | None, local_workers: int) -> int:
    """``executor.num_threads`` if given, else ``OMP_NUM_THREADS`` if set, else the usable cores divided by the workers on this
    host. Oversubscribed OpenMP threads wait for one another and are many times slower, so there are never more by default."""
    if configured is not None:
        return configured
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdigit() and int(stated) > 0:
        return int(stated)
    return max(1, usable_cores() // max(1, local_workers))


def _quota(file: Path) -> int | None:
    """Whole cores of a cgroup v2 quota ("200000 100000" is two), or None."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
