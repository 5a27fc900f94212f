"""State machine of the scheduler conformance: any order of arrivals, aborts, plans, results and pauses, in small pools."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pegboard.contracts.scheduler import PauseState
from pegboard.testing.driver import SchedulerDriver, expected_output, make_request
from pegboard.testing.fake_grammars import FakeGrammar
from pegboard.testing.fakes import hash_model
from pegboard.wire import EngineCoreRequest, FinishReason
from pegboard.wire.kv_cache import tokens_that_fit

BLOCK = 4
WINDOWS = ((None,), (None,), (None, None), (1,), (5,), (None, 4), (3, None, 9), (2, 11))
"""Of the KV-cache groups."""
VOCAB = 12


class SchedulerMachine(RuleBasedStateMachine):
    """Few tokens, short alphabets and few blocks, so that prefixes are shared and blocks run out. The driver checks books,
    plans and the cache in every step; here the outputs are compared with the model run token by token."""

    kit: Any
    allocator_name: str

    @initialize(
        usable_blocks=st.integers(1, 10),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        threshold=st.sampled_from((0, 0, 1, 3)),
        depth=st.integers(1, 3),
        max_model_len=st.sampled_from((20, 64)),
        adversary=st.one_of(st.none(), st.integers(0, 1 << 16)),
        windows=st.sampled_from(WINDOWS),
    )
    def start(
        self,
        usable_blocks: int,
        budget: int,
        max_num_seqs: int,
        threshold: int,
        depth: int,
        max_model_len: int,
        adversary: int | None,
        windows: tuple[int | None, ...],
    ) -> None:
        if "windows" not in self.kit.capabilities:
            windows = (None,) * len(windows)
        usable_blocks *= len(windows)
        self.usable = tokens_that_fit(usable_blocks, windows, BLOCK, min(budget, max_model_len))
        self.max_len = min(max_model_len, self.usable + 1)
        self.driver: SchedulerDriver = self.kit.driver(
            usable_blocks,
            BLOCK,
            depth=depth,
            allocator=self.allocator_name,
            max_model_len=max_model_len,
            model=hash_model(VOCAB),
            vocab_size=VOCAB,
            parts=self.kit.parts if adversary is None else self.kit.adversaries(adversary),
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=threshold,
            windows=windows,
        )
        self.requests: dict[str, EngineCoreRequest] = {}

    def live(self) -> list[str]:
        return [name for name in self.requests if name not in self.driver.finished]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        priority=st.integers(0, 2),
        salt=st.sampled_from((None, None, "s")),
        report=st.sampled_from((False, False, True)),
        grammar=st.sampled_from((None, None, FakeGrammar(3, 9), FakeGrammar(2, 3))),
    )
    def add(self, prompt: list[int], max_tokens: int, min_tokens: int, report: bool, **fields: Any) -> None:
        self.enter(prompt, max_tokens, min_tokens=min(min_tokens, max_tokens), prompt_logprobs=report, **fields)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6),
        reports=st.sampled_from((None, None, 0, 1)),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        priority=st.integers(0, 2),
        grammar=st.sampled_from((None, None, FakeGrammar(3, 9))),
    )
    def add_group(self, prompt: list[int], lengths: list[int], reports: int | None, **fields: Any) -> None:
        """``lengths``: of the answers, at most. The one at place ``reports`` wants prompt logprobs."""
        group = f"g{len(self.requests)}"
        for place, max_tokens in enumerate(lengths):
            self.enter(prompt, max_tokens, group=group, variant=place, prompt_logprobs=place == reports, **fields)

    def enter(
        self, prompt: list[int], max_tokens: int, prompt_logprobs: bool, grammar: Any, stops: set[int], **fields: Any
    ) -> None:
        capabilities = self.kit.capabilities
        request = make_request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens,
            stop_token_ids=sorted(stops),
            prompt_logprobs=prompt_logprobs and "prompt_logprobs" in capabilities,
            grammar=grammar if "grammars" in capabilities else None,
            **fields,
        )
        try:
            self.driver.add(request)
        except ValueError:
            assert len(prompt) > self.usable or len(prompt) >= self.max_len
            return
        assert len(prompt) <= self.usable
        self.requests[request.request_id] = request

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        names = data.draw(st.lists(st.sampled_from(self.live()), min_size=1, max_size=3, unique=True))
        assert sorted(self.driver.abort([*names, "nobody"])) == sorted(names)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: len(self.driver.in_flight) < self.driver.depth)
    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def book(self) -> None:
        self.driver.book()

    @rule(state=st.sampled_from(list(PauseState)))
    def pause(self, state: PauseState) -> None:
        self.driver.scheduler.set_pause_state(state)

    @rule()
    def reset(self) -> None:
        if self.driver.scheduler.reset_prefix_cache():
            assert self.driver.scheduler.stats().kv_usage == 0.0

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.scheduler.set_pause_state(PauseState.UNPAUSED)
        driver.run(20_000)
        assert driver.finished.keys() == self.requests.keys()
        for name, request in self.requests.items():
            tokens, reason = expected_output(request, driver.runner.next_token, self.max_len, VOCAB)
            if driver.finished[name] == FinishReason.ABORT:
                assert driver.tokens[name] == tokens[: len(driver.tokens[name])]
            else:
                assert (driver.tokens[name], driver.finished[name]) == (tokens, reason)
        driver.assert_reported(*self.requests.values())
        self.kit.assert_idle(driver)
        assert driver.runner.mirror.rows == {}
