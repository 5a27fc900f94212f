"""Which part of a parameter a tensor-parallel rank holds. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` entries from ``start`` on."""

    start: int
    length: int

    def times(self, width: int) -> Span:
        """Each entry stands for ``width`` neighbours."""
        return Span(self.start * width, self.length * width)


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``size`` ranks that share every layer."""

    rank: int = 0
    size: int = 1

    def evenly(self, count: int) -> Span:
        """Of something that the number of ranks divides."""
        each, rest = divmod(count, self.size)
        if rest:
            raise ValueError(f"{count} cannot be shared evenly by {self.size} ranks")
        return Span(self.rank * each, each)

    def key_heads(self, count: int) -> Span:
        """Where there are fewer key heads than ranks, neighbouring ranks hold the same one: that of their query heads."""
        if count >= self.size:
            return self.evenly(count)
        if self.size % count:
            raise ValueError(f"{count} key heads cannot be shared by {self.size} ranks")
        return Span(self.rank * count // self.size, 1)

    def padded(self, count: int) -> int:
        """Entries per rank of something that need not divide: as many as the fullest rank has."""
        return -(-count // self.size)

    def up_to(self, count: int) -> Span:
        """This rank's entries of something that need not divide; the last ranks have fewer, or none."""
        each = self.padded(count)
        start = min(self.rank * each, count)
        return Span(start, min(each, count - start))


WHOLE = Share()
