"""Of how many rows graphs are captured."""

from __future__ import annotations

from collections.abc import Iterable

_FIRST = (1, 2, 4)
_STEP = 8
_PADDING = 8
"""From here on a step is at most one part in so many longer than it has to be."""


def default_sizes(most: int) -> list[int]:
    """1, 2, 4, then every 8 up to 128, every 16 up to 256, every 32 up to 512 … and ``most`` itself. Ascending."""
    sizes = [size for size in _FIRST if size < most]
    size = _STEP
    while size < most:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(_STEP, octave // _PADDING)
    return [*sizes, most]


def capture_sizes(wanted: Iterable[int] | None, most: int) -> list[int]:
    """What to capture, ascending: as configured, but nothing above ``most`` rows, which no step has."""
    return default_sizes(most) if wanted is None else sorted({size for size in wanted if size <= most})
