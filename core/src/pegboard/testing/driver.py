"""SchedulerDriver: an engine loop around a scheduler and a fake runner, with any number of steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.msgpack import encode

from pegboard.contracts.scheduler import RequestStatus, Scheduler
from pegboard.testing.fakes import FakeRunner, NextToken
from pegboard.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
    salt: str | None = None,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens),
        stop_token_ids=list(stop_token_ids),
        max_tokens=max_tokens,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=salt,
    )


def expected_output(request: EngineCoreRequest, next_token: NextToken, max_len: int = 1 << 30) -> tuple[list[int], FinishReason]:
    """What the request must get, computed one token after another. ``max_len`` counts the prompt."""
    token_ids = list(request.prompt_token_ids)
    num_prompt = len(token_ids)
    while True:
        token_ids.append(next_token(token_ids))
        num_output = len(token_ids) - num_prompt
        if token_ids[-1] in request.stop_token_ids and num_output > request.sampling.min_tokens:
            return token_ids[num_prompt:], FinishReason.STOP
        if num_output >= request.max_tokens or len(token_ids) >= max_len:
            return token_ids[num_prompt:], FinishReason.LENGTH


@dataclass(slots=True)
class _InFlight:
    """A plan whose result is outstanding. ``writes``: the (group, block) pairs that it writes."""

    plan: SchedulerOutput
    output: ModelRunnerOutput
    writes: set[tuple[int, int]]
    encoded: bytes


class SchedulerDriver:
    """Plans until ``depth`` results are outstanding, then books the oldest. The runner computes each plan when it is made, as
    a worker that works through its plans in order would; only the results come late.

    ``tokens`` and ``finished`` collect what came out, by request id. A second end of a request, or a token after its end,
    raises ``AssertionError``. ``check``: ``check_integrity`` after every call.
    """

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, depth: int = 1, check: bool = True) -> None:
        self.scheduler, self.runner, self.depth, self.check = scheduler, runner, depth, check
        self.in_flight: deque[_InFlight] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.last: dict[str, EngineCoreOutput] = {}
        self.plans: list[SchedulerOutput] = []

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.tokens[request.request_id] = []
            self.finished.pop(request.request_id, None)
        self._check()

    def assert_right(self, *requests: EngineCoreRequest) -> None:
        """All of ``requests`` got what the runner's model gives them alone, and nothing is held any more."""
        for request in requests:
            expected = expected_output(request, self.runner.next_token)
            assert (self.tokens[request.request_id], self.finished[request.request_id]) == expected, request.request_id
        assert self.scheduler.stats().kv_usage == 0.0

    def abort(self, request_ids: Iterable[str] | None) -> list[str]:
        ended = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        for request_id in ended:
            assert request_id not in self.finished, f"{request_id!r} ended twice"
            self.finished[request_id] = FinishReason.ABORT
        self._check()
        return ended

    def plan(self) -> SchedulerOutput:
        """Make one plan and let the runner compute it."""
        plan = self.scheduler.schedule()
        self._check()
        self.plans.append(plan)
        given = self._given_blocks(plan)
        for step in self.in_flight:
            assert not given & step.writes, f"blocks {given & step.writes} are given away while a plan in flight writes them"
        if not plan.empty or plan.has_state_changes:
            output = self.runner.execute_model(plan)
            if not plan.empty:
                self.in_flight.append(_InFlight(plan, output, self.runner.mirror.written_blocks(plan), encode(plan)))
        return plan

    def _given_blocks(self, plan: SchedulerOutput) -> set[tuple[int, int]]:
        """Blocks that the plan hands out to be written: all new ones but prefix hits."""
        size = self.runner.mirror.block_size
        tables = [[blocks[new.num_computed_tokens // size :] for blocks in new.block_ids] for new in plan.new_requests]
        return {(group, b) for table in [*tables, *plan.block_ids] for group, blocks in enumerate(table) for b in blocks}

    def book(self) -> list[EngineCoreOutput]:
        """Give the scheduler the oldest outstanding result."""
        step = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(step.plan, step.output)
        assert encode(step.plan) == step.encoded, "a plan changed after it was made: it shares a list with the scheduler"
        for output in outputs:
            self._collect(output)
        self._check()
        return outputs

    def step(self) -> list[EngineCoreOutput]:
        """One turn of the loop: plan while there is room, then book one result."""
        while len(self.in_flight) < self.depth and self.scheduler.has_requests():
            if self.plan().empty:
                break
        return self.book() if self.in_flight else []

    def run(self, max_steps: int = 10_000) -> dict[str, list[int]]:
        """Step until nothing is left. ``AssertionError`` if that takes more than ``max_steps``, or if nothing moves."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.in_flight:
                return self.tokens
            moved, num_plans = bool(self.in_flight), len(self.plans)
            self.step()
            moved = moved or any(not plan.empty or plan.has_state_changes for plan in self.plans[num_plans:])
            assert moved, "requests are left, but nothing is planned and nothing is in flight"
        raise AssertionError(f"not finished after {max_steps} steps")

    def _collect(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        assert request_id not in self.finished, f"news of {request_id!r} after its end"
        assert output.new_token_ids or output.finish_reason, f"a message of {request_id!r} without news"
        self.tokens[request_id] += output.new_token_ids
        self.last[request_id] = output
        if output.finish_reason is not None:
            self.finished[request_id] = output.finish_reason

    def _check(self) -> None:
        if self.check:
            self.scheduler.check_integrity()
