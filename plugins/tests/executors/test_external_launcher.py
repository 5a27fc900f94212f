"""Engines of several ranks, each started by itself: their answers are those of one, equal on all ranks, whatever is left open."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.contracts.admission_policy import Admit, Hold
from pegboard.wire import StructuredOutputs

from .conftest import greedy, open_llm, rank

pytestmark = pytest.mark.slow

SIZES = [(2, 1), (1, 2), (2, 2)]
Questions = list[tuple[list[list[int]], list[SamplingParams]]]


def answered(llm: LLM, questions: Questions) -> Any:
    """Everything of each answer that a caller sees."""
    told = []
    for token_ids, params in questions:
        for output in llm.generate([{"prompt_token_ids": ids} for ids in token_ids], params):
            answers = [(list(a.token_ids), a.text, a.finish_reason, _entries(a.logprobs)) for a in output.outputs]
            told.append((answers, _entries(output.prompt_logprobs)))
    return told


def _entries(logprobs: Any) -> Any:
    """Ids and ranks, without the values, which differ in the last bits between numbers of ranks."""
    return None if logprobs is None else [p and [(i, e.rank) for i, e in p.items()] for p in logprobs]


def answers(folder: Path, questions: Questions, tp: int, pp: int, **options: Any) -> Any:
    with open_llm(folder, tp, pp, **options) as llm:
        return answered(llm, questions)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 1000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def questions() -> Questions:
    """Greedy, seeded, several answers, log probabilities, biased, stopped by a text."""
    first = [
        greedy(30),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True, n=3),
        greedy(12, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.0, seed=7, max_tokens=25, logit_bias={5: 3.0}, frequency_penalty=0.5, stop=("a", "b", "c")),
        greedy(1),
    ]
    return [(prompts(1, 7, 33, 150, 2), first), (prompts(150, 9, seed=1), [greedy(10), greedy(5, n=2)])]


@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_all_ranks_answer_as_one(launcher: Any, tiny: Path, questions: Questions, tp: int, pp: int) -> None:
    wanted = answers(tiny, questions, 1, 1, name="uniproc")
    assert launcher(tp * pp, answers, tiny, questions, tp, pp) == [wanted] * (tp * pp)


@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_seeds_that_nobody_stated_are_drawn_for_all(launcher: Any, tiny: Path, tp: int, pp: int) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=15, ignore_eos=True, n=2)
    told = launcher(tp * pp, answers, tiny, [(prompts(5, 5), [free, free])] * 2, tp, pp)
    assert all(each == told[0] for each in told)
    drawn = [tuple(tokens) for answered, _ in told[0] for tokens, *_ in answered]
    assert len(set(drawn)) == len(drawn), "every answer has a seed of its own"
    again = launcher(tp * pp, answers, tiny, [(prompts(5, 5), [free, free])] * 2, tp, pp)
    assert again[0] != told[0], "another engine draws others"


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_preemption_in_a_tiny_pool(launcher: Any, tiny: Path, tp: int, pp: int) -> None:
    asked: Questions = [(prompts(*[20] * 6), [greedy(40, seed=i) for i in range(6)])]

    def run(name: str, tp: int, pp: int) -> Any:
        small = {"num_blocks": 24, "block_size": 8}
        with open_llm(tiny, tp, pp, name=name, kv_cache=small) as llm:
            return answered(llm, asked), llm.stats().num_preemptions

    wanted, preempted = run("uniproc", 1, 1)
    assert preempted > 0
    for found, preempted in launcher(tp * pp, run, "external_launcher", tp, pp):
        assert preempted > 0
        assert found == wanted


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_grammars_that_compile_at_different_speeds(launcher: Any, tiny: Path, tp: int, pp: int) -> None:
    """A rank that has compiled a grammar waits for the others before its request begins; others go on meanwhile."""
    pytest.importorskip("llguidance")
    patterns = [f"[a-z]{{3,{5 + i}}} {i}" for i in range(5)]

    def run(name: str, tp: int, pp: int) -> Any:
        import os
        import time

        from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend

        compile_, slow = LLGuidanceBackend.compile, os.environ.get("RANK") == "1"

        def slowly(self: Any, spec: Any) -> Any:
            if slow:
                time.sleep(0.1)
            return compile_(self, spec)

        LLGuidanceBackend.compile = slowly  # type: ignore[method-assign]
        try:
            with open_llm(tiny, tp, pp, name=name) as llm:
                shaped = [greedy(20, structured_outputs=StructuredOutputs(regex=pattern)) for pattern in patterns]
                asked = prompts(*range(3, 13))
                return answered(llm, [(asked, [p for pair in zip(shaped, [greedy(30)] * 5, strict=True) for p in pair])])
        finally:
            LLGuidanceBackend.compile = compile_  # type: ignore[method-assign]

    wanted = run("uniproc", 1, 1)
    assert launcher(tp * pp, run, "external_launcher", tp, pp) == [wanted] * (tp * pp)


def test_a_grammar_that_one_rank_cannot_compile_fails_on_all(launcher: Any, tiny: Path) -> None:
    def run() -> Any:
        from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend

        compile_ = LLGuidanceBackend.compile

        def failing(self: Any, spec: Any) -> Any:
            if rank() == 1 and spec.text == "[x-z]+":
                raise ValueError("too large for this rank")
            return compile_(self, spec)

        LLGuidanceBackend.compile = failing  # type: ignore[method-assign]
        try:
            with open_llm(tiny, 2) as llm:
                params = [greedy(8, structured_outputs=StructuredOutputs(regex=text)) for text in ("[x-z]+", "[a-c]+")]
                outputs = llm.generate([{"prompt_token_ids": [5, 6]}] * 2, params)
                return [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]
        finally:
            LLGuidanceBackend.compile = compile_  # type: ignore[method-assign]

    first, second = launcher(2, run)
    assert first == second
    assert first[0] == ("error", "too large for this rank")
    assert first[1][0] != "error"


def test_the_rank_with_the_least_memory_decides_the_number_of_blocks(launcher: Any, tiny: Path) -> None:
    def run() -> int:
        from pegboard_plugins.worker import memory

        budget = memory.kv_budget
        memory.kv_budget = lambda *args: ((1 << 20) * (1 + rank()), "a test")
        try:
            with open_llm(tiny, 2, kv_cache={}) as llm:
                answered(llm, [(prompts(10), [greedy(5)])])
                return llm.engine.info.num_blocks
        finally:
            memory.kv_budget = budget

    first, second = launcher(2, run)
    assert first == second
    one_layer = 2 * 16 * 1 * 16 * 4
    assert first == (1 << 20) // (4 * one_layer) - 1


def test_the_order_of_service_goes_by_one_clock(launcher: Any, tiny: Path) -> None:
    """By priority and time of arrival, on ranks whose clocks differ and jump, and by a policy that looks at the time."""

    class Impatient:
        """Admits in some seconds only, unless nothing runs."""

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def admit(self, request: Any, context: Any) -> Any:
            self.seen.append((request.request_id, request.arrival_time, context.now))
            return Hold() if context.num_running and context.now % 3 < 2 else Admit()

    def run() -> Any:
        import time
        from itertools import count

        real, ticks, number = time.time, count(), rank()
        time.time = lambda: 1e9 + 50.5 * number + (next(ticks) * (7 - 3 * number)) % 40
        try:
            with open_llm(tiny, 2, scheduler={"queue": "priority", "max_num_seqs": 2}) as llm:
                policies = llm.engine.client.core.scheduler.policies  # type: ignore[attr-defined]
                policies.admission = Impatient()
                asked = [(prompts(*[6] * 8), [greedy(6 + i, priority=i % 2) for i in range(8)])]
                return answered(llm, asked), policies.admission.seen
        finally:
            time.time = real

    first, second = launcher(2, run)
    assert first == second
    assert len({now for _, _, now in first[1]}) > 4, "time goes on"


def test_sets_are_never_gone_through_in_the_order_of_their_hashes(launcher: Any, tiny: Path) -> None:
    """Every process has hashes of its own. All requests of a batch that is refused half-way are aborted, then others run."""

    def run() -> Any:
        with open_llm(tiny, 2) as llm:
            engine, told = llm.engine, []
            for turn in range(3):
                names = [f"{turn}-{letter}" for letter in "abcdefgh"]
                for name, ids in zip(names, prompts(*[9] * 8, seed=turn), strict=True):
                    engine.add_request(name, {"prompt_token_ids": ids}, greedy(30))
                for _ in range(4):
                    engine.step()
                engine.withdraw(names)
                told.append(answered(llm, [(prompts(30, 30, 30, seed=9), [greedy(8)] * 3)]))
            return told, hash("a")

    first, second = launcher(2, run)
    assert first[1] != second[1], "hashes are random"
    assert first[0] == second[0]


def test_engines_in_turn_and_at_once(launcher: Any, tiny: Path) -> None:
    def run() -> Any:
        found = [answers(tiny, [(prompts(5), [greedy(8)])], 2, 1) for _ in range(2)]
        with open_llm(tiny, 2) as one, open_llm(tiny, 2) as other:
            pairs = zip(prompts(4, 5, 6), prompts(4, 5, 6), strict=True)
            found += [answered(llm, [([ids], [greedy(6)])]) for a, b in pairs for llm, ids in ((one, a), (other, b))]
        return found

    first, second = launcher(2, run)
    assert first == second
    assert first[0] == first[1]
    assert first[2::2] == first[3::2]


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_distributed"])
def test_either_communicator(launcher: Any, tiny: Path, communicator: str) -> None:
    asked = [(prompts(20, 3), [greedy(10)] * 2)]
    wanted = answers(tiny, asked, 1, 1, name="uniproc")
    chosen = {"executor": {"communicator": communicator}}
    run: Callable[..., Any] = answers
    assert launcher(2, _with_options, run, chosen, tiny, asked, 2, 1) == [wanted] * 2


def _with_options(function: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    return function(*args, **options)
