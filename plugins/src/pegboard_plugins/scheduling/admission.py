"""DefaultAdmission: let the next request in while the running ones keep room to grow."""

from __future__ import annotations

from pegboard.contracts.admission_policy import Admission, AdmissionPolicy, Admit
from pegboard.contracts.views import RequestView, SchedulingView

RESERVE_SHARE = 0.01
"""Share of the pool that admissions leave free."""


class DefaultAdmission(AdmissionPolicy):
    """Admits when, beside the request's own blocks, one block stays free for each running request (each needs another one
    within ``block_size`` steps), and at least 1 % of the pool. So the newcomer does not push somebody out at once."""

    def admit(self, request: RequestView, context: SchedulingView) -> Admission:
        return Admit(reserve_blocks=max(context.num_running, int(context.num_blocks * RESERVE_SHARE)))
