"""What a section of the check yields."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One line of the table. ``figures`` go into the file that ``--json`` writes."""

    name: str
    passed: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name:58s} {self.detail}"

    def data(self) -> dict[str, Any]:
        return asdict(self)
