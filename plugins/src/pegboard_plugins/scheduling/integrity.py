"""check_books: everything that must hold between two calls of the scheduler."""

from __future__ import annotations

from pegboard.contracts.scheduler import RequestStatus
from pegboard_plugins.scheduling.groups import PromptGroup
from pegboard_plugins.scheduling.request import NEVER, NO_SLOT, Request
from pegboard_plugins.scheduling.state import SchedulerState

_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def check_books(state: SchedulerState) -> None:
    """Raise ``AssertionError`` if the scheduler's books do not balance."""
    state.kv.check_integrity()
    running = {r.request_id: r for r in state.running}
    waiting = {r.request_id: r for r in state.waiting}
    assert len(running) == len(state.running), "a request runs twice"
    assert not running.keys() & waiting.keys(), "a request runs and waits"
    assert {**running, **waiting} == state.requests, "running and waiting requests are not all requests"
    slots = [r.slot for r in state.running] + state.free_slots
    assert sorted(slots) == list(range(state.max_num_seqs)), f"slots lost or given twice: {sorted(slots)}"
    steps = [plan.step_id for plan in state.in_flight]
    assert steps == sorted(set(steps)), f"plans in flight are out of order: {steps}"
    assert all(step > state.processed_step for step in steps), "a plan in flight has been processed"
    for request in state.running:
        _check_running(state, request)
    for request in waiting.values():
        _check_waiting(state, request)
    _check_groups(state)
    _check_copies(state)
    assert state.special == {r.request_id: r for r in state.running if r.is_special}, "special requests are booked wrongly"
    deferred = [key for _, key in state.deferred]
    assert len(deferred) == len(set(deferred)), "blocks are to be freed twice"
    assert not deferred or state.in_flight, "blocks wait for a plan that is not in flight"
    holders = {*deferred, *(r.kv_key for r in state.running)}
    assert state.kv.holders <= holders, f"blocks held by nobody: {state.kv.holders - holders}"


def _check_groups(state: SchedulerState) -> None:
    groups = state.groups
    members = {request_id: group for group in groups.groups.values() for request_id in group.members}
    assert members == {r.request_id: r.group for r in state.requests.values() if r.group is not None}, "members and groups differ"
    assert sum(len(group.members) for group in groups.groups.values()) == len(members), "a request is in two groups"
    assert groups.computing == {key: g for key, g in groups.groups.items() if g.computing}, "groups that compute are not booked"
    for key, group in groups.groups.items():
        assert group.key == key, "a group under another key"
        assert group.members, "a group without members"
        for request in group.members.values():
            _check_member(group, request)


def _check_member(group: PromptGroup, request: Request) -> None:
    place, request_id = repr(request), request.request_id
    in_batch = request.status is RequestStatus.RUNNING
    assert (request_id in group.computing) + (request_id in group.computed) == in_batch, f"{place}: waits, computes or computed?"
    assert (request_id in group.computed) == (request.fork_step != NEVER), f"{place}: fork step {request.fork_step}"
    if in_batch:
        computed = request.num_computed >= request.num_prompt
        assert computed == (request_id in group.computed), f"{place} is booked on the wrong side of its prompt"


def _check_copies(state: SchedulerState) -> None:
    """Every copy that is still wanted goes to the last block of its request, which nobody else holds."""
    destinations: list[int] = []
    for copies in state.pending_copies:
        if copies.wanted:
            last = [blocks[-1] for blocks in state.kv.block_ids(copies.kv_key)]
            assert [block for _, block in copies.pairs] == last, f"{copies.request!r} has other blocks than are copied for it"
            destinations += last
    assert len(set(destinations)) == len(destinations), "two copies go to one block"
    assert all(state.kv.allocator.ref_count(block) == 1 for block in destinations), "a block is shared before it is copied"


def _check_running(state: SchedulerState, request: Request) -> None:
    known, place = len(request.token_ids), repr(request)
    assert request.status is RequestStatus.RUNNING, place
    assert known < request.max_len, f"{place} should have ended at {request.max_len}"
    assert known + request.num_placeholders <= request.max_len, f"{place} is planned beyond {request.max_len}"
    assert 0 <= request.num_computed < known + request.num_placeholders, f"{place} is computed beyond its tokens"
    assert request.num_computed <= request.capacity, f"{place} is computed beyond its {request.capacity} places"
    capacity = state.capacity(request)
    assert request.capacity == capacity, f"{place} counts {request.capacity} places where {capacity} are"
    assert request.num_placeholders == 0 or any(request in plan.rows for plan in state.in_flight), f"{place} waits for nothing"


def _check_waiting(state: SchedulerState, request: Request) -> None:
    place = repr(request)
    assert request.status in _WAITING, place
    assert request.slot == NO_SLOT, f"{place} has a slot"
    assert request.num_computed == request.num_placeholders == request.capacity == 0, f"{place} kept something"
