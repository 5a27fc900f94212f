"""Which processor cores a rank may use."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_TOPOLOGY: Final = "/sys/devices/system/cpu/cpu{}/topology"
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def shares(ranks: int, wanted: bool | None, on_cpu: bool) -> list[frozenset[int]] | None:
    """The processors of each rank, or None to bind none. ``wanted`` None: where it helps, which is several ranks that compute on
    the processor and have two cores each. A core is never shared, with all its hardware threads, and neighbours go to one rank.

    Raises ``ValueError`` when it is ``wanted`` and there are fewer cores than ranks.
    """
    if wanted is False or (wanted is None and (ranks == 1 or not on_cpu or _quota() is not None)):
        return None
    cores = _cores(os.sched_getaffinity(0))
    if len(cores) < (ranks if wanted else 2 * ranks):
        if wanted:
            raise ValueError(
                f"plugins.executor_mp.bind_cores: {len(cores)} cores are not enough for {ranks} ranks; leave it unset"
            )
        return None
    bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return [frozenset().union(*cores[start:end]) for start, end in itertools.pairwise(bounds)]


def num_cores(processors: Iterable[int]) -> int:
    """Physical ones."""
    return len(_cores(processors))


def _cores(processors: Iterable[int]) -> list[frozenset[int]]:
    """Physical cores as the sets of their processors, those of one package side by side."""
    found: dict[tuple[int, int], set[int]] = {}
    for cpu in sorted(processors):
        folder = Path(_TOPOLOGY.format(cpu))
        place = (_number(folder / "physical_package_id", 0), _number(folder / "core_id", cpu))
        found.setdefault(place, set()).add(cpu)
    return [frozenset(found[place]) for place in sorted(found)]


def _number(file: Path, default: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return default


def _quota() -> int | None:
    """Whole cores of a container's quota, which says how much may be used, but not where."""
    try:
        quota, period = _QUOTA.read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
