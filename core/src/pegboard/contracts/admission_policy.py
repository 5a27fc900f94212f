"""AdmissionPolicy: may the next waiting request start now?"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Final

from pegboard.contracts.views import RequestView, SchedulingView

API: Final = 1


@dataclass(frozen=True, slots=True)
class Admit:
    """Admit. ``max_tokens`` caps its first chunk; ``reserve_blocks`` must stay free after its first chunk is allocated."""

    max_tokens: int | None = None
    reserve_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop admitting in this step; the request stays first."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Skip:
    """Pass over this request in this step; the next one may be admitted."""

    reason: str = ""


Admission = Admit | Hold | Skip


class AdmissionPolicy(abc.ABC):
    """Asked once per candidate and step, in queue order, after the budgets have been checked.

    Invariants: pure; a request that is held for ever is the policy's fault, except that core admits the first waiting
    request when nothing runs.
    """

    @abc.abstractmethod
    def admit(self, request: RequestView, context: SchedulingView) -> Admission | None:
        """None abstains: the request is admitted."""
