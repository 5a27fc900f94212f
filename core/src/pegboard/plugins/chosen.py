"""What a ``select_*`` hook may answer with: a name, and why."""

from __future__ import annotations


class Chosen(str):
    """The name of a candidate. ``reason`` is shown wherever it is told why a part was chosen: half a sentence, without a stop."""

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, name: str, reason: str) -> Chosen:
        chosen = super().__new__(cls, name)
        chosen.reason = reason
        return chosen
