"""SchedulerDriver: an engine loop around a scheduler and a fake runner, with any number of steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.msgpack import encode

from pegboard.contracts.scheduler import RequestStatus, Scheduler
from pegboard.testing.fake_grammars import FakeGrammar, FakeGrammars, first_allowed
from pegboard.testing.fakes import VARIANT, FakeRunner, NextToken, fake_prompt_logprobs, variant_of
from pegboard.testing.sharing import SharingCheck
from pegboard.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Logprobs,
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
    group: str | None = None,
    variant: int | None = None,
    prompt_logprobs: bool = False,
    grammar: FakeGrammar | None = None,
) -> EngineCoreRequest:
    """``variant``: requests with equal prompts get distinct answers from the fake model."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=0 if prompt_logprobs else None
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=sampling,
        stop_token_ids=list(stop_token_ids),
        max_tokens=max_tokens,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=salt,
        group=group,
        grammar=grammar.spec if grammar is not None else None,
        ext={} if variant is None else {VARIANT: variant},
    )


def make_group(name: str, prompt: Sequence[int], n: int, max_tokens: int = 8, **fields: Any) -> list[EngineCoreRequest]:
    """``n`` requests of one group with distinct answers; only the first gets ``prompt_logprobs``."""
    first = fields.pop("prompt_logprobs", False)
    return [
        make_request(f"{name}/{i}", prompt, max_tokens, group=name, variant=i, prompt_logprobs=first and not i, **fields)
        for i in range(n)
    ]


def expected_output(
    request: EngineCoreRequest, next_token: NextToken, max_len: int = 1 << 30, vocab_size: int = 1000
) -> tuple[list[int], FinishReason]:
    """What the request must get, computed one token after another. ``max_len`` counts the prompt; ``vocab_size`` is that of the
    grammars."""
    next_token = variant_of(next_token, request.ext)
    grammar = FakeGrammar.of(request.grammar) if request.grammar is not None else None
    token_ids = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        token = next_token(token_ids)
        if grammar is not None:
            token = first_allowed(token, grammar.allowed(output, vocab_size))
        token_ids.append(token)
        output.append(token)
        if token in request.stop_token_ids and len(output) > request.sampling.min_tokens:
            return output, FinishReason.STOP
        if grammar is not None and grammar.complete(output):
            return output, FinishReason.STOP
        if len(output) >= request.max_tokens or len(token_ids) >= max_len:
            return output, FinishReason.LENGTH


@dataclass(slots=True)
class _InFlight:
    """A plan whose result is outstanding. ``writes``: the blocks that it writes."""

    plan: SchedulerOutput
    output: ModelRunnerOutput
    writes: set[int]
    encoded: bytes


class SchedulerDriver:
    """Plans until ``depth`` results are outstanding, then books the oldest. The runner computes each plan when it is made, as
    a worker that works through its plans in order would; only the results come late.

    ``tokens``, ``prompt_logprobs`` and ``finished`` collect what came out, by request id. A second end of a request, or a token
    after its end, raises ``AssertionError``. ``check``: ``check_integrity`` after every call. ``grammars`` are those that the
    scheduler was given. ``shares_prompts``: plans must pass ``SharingCheck``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: FakeRunner,
        depth: int = 1,
        check: bool = True,
        grammars: FakeGrammars | None = None,
        shares_prompts: bool = False,
    ) -> None:
        self.scheduler, self.runner, self.depth, self.check, self.grammars = scheduler, runner, depth, check, grammars
        self.sharing = SharingCheck(runner.mirror) if shares_prompts else None
        self.in_flight: deque[_InFlight] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[Logprobs]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.last: dict[str, EngineCoreOutput] = {}
        self.plans: list[SchedulerOutput] = []

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            if request.grammar is not None and self.grammars is not None:
                self.grammars.start(request.request_id, request.grammar)
            if self.sharing is not None:
                self.sharing.add(request)
            self.tokens[request.request_id] = []
            self.prompt_logprobs.pop(request.request_id, None)
            self.finished.pop(request.request_id, None)
        self._check()

    def assert_right(self, *requests: EngineCoreRequest) -> None:
        """All of ``requests`` got what the runner's model gives them alone, and nothing is held any more."""
        for request in requests:
            expected = expected_output(request, self.runner.next_token)
            assert (self.tokens[request.request_id], self.finished[request.request_id]) == expected, request.request_id
        self.assert_reported(*requests)
        assert self.scheduler.stats().kv_usage == 0.0

    def assert_reported(self, *requests: EngineCoreRequest) -> None:
        """Prompt logprobs came for those that want them and got a token, and for no other; no grammar is kept for any."""
        for request in requests:
            request_id, prompt = request.request_id, request.prompt_token_ids
            wanted = request.sampling.prompt_logprobs is not None and self.tokens[request_id]
            assert self.prompt_logprobs.get(request_id, []) == (fake_prompt_logprobs(prompt) if wanted else []), request_id
            assert self.grammars is None or request_id not in self.grammars.outputs, f"{request_id!r} has ended with a grammar"

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
        if self.sharing is not None:
            self.sharing.check(plan)
        self.plans.append(plan)
        given = self._given_blocks(plan)
        for step in self.in_flight:
            assert not given & step.writes, f"blocks {given & step.writes} are given away while a plan in flight writes them"
        if not plan.empty or plan.has_state_changes:
            output = self.runner.execute_model(plan, self.scheduler.grammar_output(plan))
            if not plan.empty:
                self.in_flight.append(_InFlight(plan, output, self.runner.mirror.written_blocks(plan), encode(plan)))
        return plan

    def _given_blocks(self, plan: SchedulerOutput) -> set[int]:
        """Blocks that the plan hands out to be written: all new ones but prefix hits."""
        size = self.runner.mirror.block_size
        tables = [[blocks[new.num_computed_tokens // size :] for blocks in new.block_ids] for new in plan.new_requests]
        return {block for table in [*tables, *plan.block_ids] for blocks in table for block in blocks}

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
        if output.prompt_logprobs:
            assert output.new_token_ids, f"prompt logprobs of {request_id!r} before its first token"
            assert not self.tokens[request_id], f"prompt logprobs of {request_id!r} after its first token"
            self.prompt_logprobs[request_id] = output.prompt_logprobs
        self.tokens[request_id] += output.new_token_ids
        self.last[request_id] = output
        if output.finish_reason is not None:
            self.finished[request_id] = output.finish_reason

    def _check(self) -> None:
        if self.check:
            self.scheduler.check_integrity()
