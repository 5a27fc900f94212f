"""PlanDriver: plans made by hand, for tests of workers without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.testing.windows import first_seen
from pegboard.wire import (
    PLACEHOLDER_TOKEN,
    GrammarOutput,
    Logprobs,
    ModelRunnerOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def bitmask(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """A row of a ``GrammarOutput`` in which these ids are allowed."""
    return sum(1 << token_id for token_id in set(token_ids)).to_bytes(-(-vocab_size // 32) * 4, "little")


def random_prompts(*lengths: int, vocab_size: int = 1000, seed: int = 1) -> dict[str, list[int]]:
    """Prompts of these lengths, by name."""
    draw = random.Random(seed)
    return {f"p{i}-{length}": [draw.randrange(vocab_size) for _ in range(length)] for i, length in enumerate(lengths)}


@dataclass
class DrivenRequest:
    """A request as the driver knows it. ``token_ids``: prompt and output so far. ``source``: the request from which it is forked
    when it starts. ``tables``: blocks by KV-cache group, null behind its window. ``prompt_logprobs``: position of a prompt token
    to what the worker said of it, the last time."""

    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    stop_token_ids: list[int]
    slot: int | None = None
    computed: int = 0
    sent: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    source: str | None = None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """Those of the first group."""
        return self.tables[0]

    @blocks.setter
    def blocks(self, blocks: list[int]) -> None:
        self.tables[0] = blocks

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


class PlanDriver:
    """Keeps slots and (scattered) blocks, writes plans with any mixture of chunks, and books what comes back. Slots and blocks
    that were given up are the next to be used, in the plan that gives them up; so are blocks behind a sliding window.

    ``execute`` takes a plan and returns its ``ModelRunnerOutput``: a worker's or an executor's ``execute_model``. ``sample`` is
    its ``sample_tokens``, for steps with masks over ``vocab_size`` ids. ``windows``: of the KV-cache groups. ``sends_tokens``:
    there are pipeline stages, so plans bring all tokens.
    """

    def __init__(
        self,
        execute: Callable[[SchedulerOutput], Any],
        *,
        num_slots: int,
        block_size: int,
        num_blocks: int,
        sample: Callable[[GrammarOutput], Any] | None = None,
        vocab_size: int = 0,
        sends_tokens: bool = False,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.execute, self.block_size, self.sends_tokens, self.windows = execute, block_size, sends_tokens, windows
        self.sample, self.vocab_size = sample, vocab_size
        self.requests: dict[str, DrivenRequest] = {}
        self.last_output: ModelRunnerOutput | None = None
        order = random.Random(0)
        self._free_slots = order.sample(range(num_slots), num_slots)
        self._free_blocks = order.sample(range(1, num_blocks), num_blocks - 1)
        self._sharers: dict[int, int] = {}
        """Block to the number of its holders, where there are several."""
        self._copies: list[tuple[int, int]] = []
        self._begins: dict[int, list[int]] = {}
        """Step id to the computed tokens of its rows."""
        self._step_id = 0
        self._finished: list[int] = []
        self._preempted: list[int] = []

    def add(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, stop_token_ids: Sequence[int] = ()
    ) -> None:
        request = DrivenRequest(list(prompt), len(prompt), sampling, list(stop_token_ids))
        request.tables = [[] for _ in self.windows]
        self.requests[request_id] = request

    def fork(self, request_id: str, source: str, sampling: SamplingParams = GREEDY) -> None:
        """A request with the prompt of ``source``. Named with 0 tokens in the plan that computes the end of that prompt, it
        shares its full blocks and gets a copy of the partly filled one with the next plan; named later, it is like any other."""
        origin = self.requests[source]
        self.add(request_id, origin.token_ids[: origin.prompt_len], sampling, origin.stop_token_ids)
        self.requests[request_id].source = source

    def share_prefix(self, request_id: str, source: str, num_blocks: int) -> None:
        """A request that has not started gets the first blocks of ``source``, as from a prefix cache."""
        request, origin = self.requests[request_id], self.requests[source]
        request.tables = [self._shared(blocks[:num_blocks]) for blocks in origin.tables]
        request.computed = len(request.blocks) * self.block_size

    def finish(self, request_id: str) -> DrivenRequest:
        request = self.requests.pop(request_id)
        self._leave(request, self._finished)
        return request

    def preempt(self, request_id: str) -> None:
        """Forget what was computed; the next step that names the request starts it again."""
        self._leave(self.requests[request_id], self._preempted)
        self.requests[request_id].computed = 0

    def plan(self, chunks: Mapping[str, int], grammars: Sequence[str] = ()) -> SchedulerOutput:
        """The next plan: so many more tokens of each of these requests, in this order; ``grammars`` names those with a mask."""
        self._step_id += 1
        plan = SchedulerOutput(
            step_id=self._step_id,
            finished_slots=self._finished,
            preempted_slots=self._preempted,
            block_copies=self._copies,
        )
        self._finished, self._preempted, self._copies = [], [], []
        for request in self.requests.values():
            self._pass(request)
        entering = [name for name in chunks if self.requests[name].slot is None]
        forks = {name: self.requests[name].source for name, count in chunks.items() if not count}
        fresh = {
            name: self._take_blocks(self.requests[name], self.requests[name].computed + count) for name, count in chunks.items()
        }
        for name in entering:
            self.requests[name].slot = self._free_slots.pop()
        for name, source in forks.items():
            assert source is not None, f"{name!r} computes no token and is no fork"
            self._start_fork(plan, self.requests[name], self.requests[source])
        for name, count in chunks.items():
            self._schedule(plan, name, count, fresh[name], name in entering)
        plan.grammar_slots = [slot for name in grammars if (slot := self.requests[name].slot) is not None]
        self._begins[plan.step_id] = plan.num_computed_tokens
        return plan

    def step(self, chunks: Mapping[str, int], allowed: Mapping[str, Sequence[int]] | None = None) -> dict[str, int]:
        """Plan, execute and book. Returns the tokens that were sampled. ``allowed``: requests to the ids of their masks."""
        plan = self.plan(chunks, list(allowed or ()))
        output = self.execute(plan)
        if allowed:
            assert output is None, "a step with grammar rows samples in its second half"
            assert self.sample is not None, "masks need sample_tokens"
            masks = b"".join(bitmask(ids, self.vocab_size) for ids in allowed.values())
            output = self.sample(GrammarOutput(step_id=plan.step_id, slots=plan.grammar_slots, bitmask=masks))
        return self.book(chunks, output)

    def book(self, chunks: Mapping[str, int], output: ModelRunnerOutput) -> dict[str, int]:
        """Enter a step's tokens where its plan left placeholders (the first one of each request)."""
        self.last_output = output
        sampled = {}
        for row, (name, begin, tokens) in enumerate(
            zip(chunks, self._begins.pop(output.step_id), output.sampled_token_ids, strict=True)
        ):
            request = self.requests[name]
            request.logprobs += output.logprobs.get(row, [])
            request.prompt_logprobs.update(enumerate(output.prompt_logprobs.get(row, []), begin + 1))
            if tokens:
                request.token_ids[request.token_ids.index(PLACEHOLDER_TOKEN)] = tokens[0]
                sampled[name] = tokens[0]
        return sampled

    def generate(self, max_tokens: int, chunk: int = 1 << 30) -> dict[str, list[int]]:
        """Run all requests until each has ``max_tokens`` of output; prompts in chunks of at most ``chunk``. Forks start with the
        last chunk of their source, or by themselves where it has started before."""
        while True:
            open_ = {n: r for n, r in self.requests.items() if len(r.output) < max_tokens}
            if not open_:
                return {name: request.output for name, request in self.requests.items()}
            chunks = {n: min(chunk, len(r.token_ids) - r.computed) for n, r in open_.items()}
            for name, request in open_.items():
                source = self.requests.get(request.source) if request.source is not None else None
                if request.slot is None and source is not None and not source.output:
                    ends = source.computed + chunks[str(request.source)] == source.prompt_len
                    chunks[name] = 0 if ends else -1
            self.step({name: count for name, count in chunks.items() if count >= 0})

    def _start_fork(self, plan: SchedulerOutput, request: DrivenRequest, source: DrivenRequest) -> None:
        assert request.slot is not None
        assert source.slot is not None, "the source is not in the plan"
        full, rest = divmod(request.prompt_len, self.block_size)
        request.tables, request.computed = [self._shared(blocks[:full]) for blocks in source.tables], request.prompt_len
        if rest:
            for blocks, originals in zip(request.tables, source.tables, strict=True):
                blocks.append(self._free_blocks.pop())
                self._copies.append((originals[full], blocks[full]))
        plan.fork_slots.append(request.slot)
        plan.fork_sources.append(source.slot)
        request.source = None

    def _schedule(self, plan: SchedulerOutput, name: str, count: int, fresh: list[list[int]], enters: bool) -> None:
        request = self.requests[name]
        assert request.slot is not None
        if enters:
            plan.new_requests.append(self._new(name, request))
        elif any(fresh):
            plan.block_slots.append(request.slot)
            plan.block_ids.append(fresh)
        if self.sends_tokens and not enters and request.sent < len(request.token_ids):
            plan.token_slots.append(request.slot)
            plan.token_ids.append(request.token_ids[request.sent :])
        request.sent = len(request.token_ids)
        plan.slots.append(request.slot)
        plan.num_scheduled_tokens.append(count)
        plan.num_computed_tokens.append(request.computed)
        request.computed += count
        plan.num_to_sample.append(int(request.computed == len(request.token_ids)))
        if request.computed == len(request.token_ids):
            request.token_ids.append(PLACEHOLDER_TOKEN)

    def _new(self, name: str, request: DrivenRequest) -> NewRequestData:
        assert request.slot is not None
        return NewRequestData(
            slot=request.slot,
            request_id=name,
            token_ids=list(request.token_ids),
            prompt_len=request.prompt_len,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            block_ids=[list(blocks) for blocks in request.tables],
            num_computed_tokens=request.computed,
        )

    def _take_blocks(self, request: DrivenRequest, num_tokens: int) -> list[list[int]]:
        """New ones for each group."""
        taken = []
        for blocks in request.tables:
            fresh = [self._free_blocks.pop() for _ in range(-(-num_tokens // self.block_size) - len(blocks))]
            blocks += fresh
            taken.append(fresh)
        return taken

    def _pass(self, request: DrivenRequest) -> None:
        """Give up what no token after those computed looks at."""
        for blocks, window in zip(request.tables, self.windows, strict=True):
            first = first_seen(request.computed, window, self.block_size)
            self._give_up(blocks[:first])
            blocks[:first] = [NULL_BLOCK] * first

    def _shared(self, blocks: Sequence[int]) -> list[int]:
        for block in blocks:
            if block != NULL_BLOCK:
                self._sharers[block] = self._sharers.get(block, 1) + 1
        return list(blocks)

    def _leave(self, request: DrivenRequest, into: list[int]) -> None:
        if request.slot is not None:
            into.append(request.slot)
            self._free_slots.append(request.slot)
        held = [block for blocks in request.tables for block in blocks]
        self._copies = [pair for pair in self._copies if pair[1] not in held]
        self._give_up(held)
        request.slot, request.tables = None, [[] for _ in self.windows]

    def _give_up(self, blocks: Sequence[int]) -> None:
        self._free_blocks += [block for block in blocks if block != NULL_BLOCK and not self._release(block)]

    def _release(self, block: int) -> bool:
        """One holder less. True while there are others."""
        holders = self._sharers.pop(block, 1) - 1
        if holders > 1:
            self._sharers[block] = holders
        return holders > 0
