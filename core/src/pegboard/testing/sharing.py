"""SharingCheck: a scheduler that shares prompts computes none of them a second time while somebody has it."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.testing.mirror import MirrorRow, MirrorWorker
from pegboard.wire import EngineCoreRequest, NewRequestData, SchedulerOutput


class SharingCheck:
    """Looks at plans before they are applied. Raises ``AssertionError`` where a member of a group enters the batch with more
    than one token of its prompt to compute while another member is in it, in its prompt or beyond.

    Members that have output already, and those that want prompt logprobs, must compute.
    """

    def __init__(self, mirror: MirrorWorker) -> None:
        self.mirror = mirror
        self._groups: dict[str, tuple[object, ...]] = {}

    def add(self, request: EngineCoreRequest) -> None:
        if request.group is None:
            self._groups.pop(request.request_id, None)
        else:
            self._groups[request.request_id] = (request.group, request.cache_salt, *request.prompt_token_ids)

    def check(self, plan: SchedulerOutput) -> None:
        leaving = {*plan.finished_slots, *plan.preempted_slots}
        present = self._present(row for slot, row in self.mirror.rows.items() if slot not in leaving)
        for new in plan.new_requests:
            group = self._groups.get(new.request_id)
            must_compute = len(new.token_ids) > new.prompt_len or new.sampling.prompt_logprobs is not None
            assert must_compute or group not in present or new.num_computed_tokens >= new.prompt_len - 1, (
                f"{new.request_id!r} computes its prompt from token {new.num_computed_tokens} on, which another one has"
            )
            present |= self._present([new])

    def _present(self, rows: Iterable[MirrorRow | NewRequestData]) -> set[tuple[object, ...]]:
        return {self._groups[row.request_id] for row in rows if row.request_id in self._groups}
