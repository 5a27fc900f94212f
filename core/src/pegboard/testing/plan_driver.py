"""PlanDriver: plans made by hand, for tests of workers without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.wire import PLACEHOLDER_TOKEN, ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@dataclass
class DrivenRequest:
    """A request as the driver knows it. ``token_ids``: prompt and output so far."""

    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    stop_token_ids: list[int]
    slot: int | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


class PlanDriver:
    """Keeps slots and (scattered) blocks, writes plans with any mixture of chunks, and books what comes back.

    ``execute`` takes a plan and returns its ``ModelRunnerOutput``: a worker's or an executor's ``execute_model``.
    """

    def __init__(self, execute: Callable[[SchedulerOutput], Any], *, num_slots: int, block_size: int, num_blocks: int) -> None:
        self.execute, self.block_size = execute, block_size
        self.requests: dict[str, DrivenRequest] = {}
        self.last_output: ModelRunnerOutput | None = None
        order = random.Random(0)
        self._free_slots = order.sample(range(num_slots), num_slots)
        self._free_blocks = order.sample(range(1, num_blocks), num_blocks - 1)
        self._step_id = 0
        self._finished: list[int] = []
        self._preempted: list[int] = []

    def add(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, stop_token_ids: Sequence[int] = ()
    ) -> None:
        self.requests[request_id] = DrivenRequest(list(prompt), len(prompt), sampling, list(stop_token_ids))

    def finish(self, request_id: str) -> DrivenRequest:
        request = self.requests.pop(request_id)
        self._leave(request, self._finished)
        return request

    def preempt(self, request_id: str) -> None:
        """Forget what was computed; the next step that names the request starts it again."""
        self._leave(self.requests[request_id], self._preempted)
        self.requests[request_id].computed = 0

    def plan(self, chunks: Mapping[str, int]) -> SchedulerOutput:
        """The next plan: so many more tokens of each of these requests, in this order."""
        self._step_id += 1
        plan = SchedulerOutput(step_id=self._step_id, finished_slots=self._finished, preempted_slots=self._preempted)
        self._finished, self._preempted = [], []
        for name, count in chunks.items():
            request = self.requests[name]
            end = request.computed + count
            fresh = self._take_blocks(request, end)
            if request.slot is None:
                request.slot = self._free_slots.pop()
                plan.new_requests.append(self._new(name, request))
            elif fresh:
                plan.block_slots.append(request.slot)
                plan.block_ids.append([fresh])
            plan.slots.append(request.slot)
            plan.num_scheduled_tokens.append(count)
            plan.num_computed_tokens.append(request.computed)
            plan.num_to_sample.append(int(end == len(request.token_ids)))
            request.computed = end
            if end == len(request.token_ids):
                request.token_ids.append(PLACEHOLDER_TOKEN)
        return plan

    def step(self, chunks: Mapping[str, int]) -> dict[str, int]:
        """Plan, execute and book. Returns the tokens that were sampled."""
        return self.book(chunks, self.execute(self.plan(chunks)))

    def book(self, chunks: Mapping[str, int], output: ModelRunnerOutput) -> dict[str, int]:
        """Enter a step's tokens where its plan left placeholders (the first one of each request)."""
        self.last_output = output
        sampled = {}
        for name, tokens in zip(chunks, output.sampled_token_ids, strict=True):
            if tokens:
                request = self.requests[name]
                request.token_ids[request.token_ids.index(PLACEHOLDER_TOKEN)] = tokens[0]
                sampled[name] = tokens[0]
        return sampled

    def generate(self, max_tokens: int, chunk: int = 1 << 30) -> dict[str, list[int]]:
        """Run all requests until each has ``max_tokens`` of output; prompts in chunks of at most ``chunk``."""
        while True:
            open_ = {n: r for n, r in self.requests.items() if len(r.output) < max_tokens}
            if not open_:
                return {name: request.output for name, request in self.requests.items()}
            self.step({n: min(chunk, len(r.token_ids) - r.computed) for n, r in open_.items()})

    def _new(self, name: str, request: DrivenRequest) -> NewRequestData:
        assert request.slot is not None
        return NewRequestData(
            slot=request.slot,
            request_id=name,
            token_ids=list(request.token_ids),
            prompt_len=request.prompt_len,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            block_ids=[list(request.blocks)],
        )

    def _take_blocks(self, request: DrivenRequest, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self.block_size) - len(request.blocks)
        fresh = [self._free_blocks.pop() for _ in range(missing)]
        request.blocks += fresh
        return fresh

    def _leave(self, request: DrivenRequest, into: list[int]) -> None:
        if request.slot is not None:
            into.append(request.slot)
            self._free_slots.insert(0, request.slot)
            self._free_blocks = request.blocks + self._free_blocks
        request.slot, request.blocks = None, []
