"""Ranks that do not do the same are told so where it happens, all of them, and who is where."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.engine.errors import EngineDeadError
from pegboard_plugins.executors.launched.points import DriftError

from .conftest import greedy, open_llm, rank

pytestmark = pytest.mark.slow

TEN = greedy(10)


def told(launcher: Any, ranks: int, function: Any, *args: Any) -> list[str]:
    """What each rank's engine dies of. ``function`` gets an engine, and must not return."""

    def run() -> str:
        with open_llm(*args) as llm:
            try:
                function(llm)
            except EngineDeadError as error:
                return f"{type(error.cause).__name__}: {error.cause}"
            return "nothing"

    return [str(text) for text in launcher(ranks, run)]


def test_another_prompt_on_one_rank(launcher: Any, tiny: Path) -> None:
    def run(llm: LLM) -> None:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8] * (4 + rank())}], TEN)

    for text in told(launcher, 2, run, tiny):
        assert text.startswith("DriftError: the engines have drifted apart: ")
        assert "rank 0 is at adding request '1@1' with 4 prompt tokens" in text
        assert "rank 1 is at adding request '1@1' with 5 prompt tokens" in text


def test_other_parameters_on_one_of_four_ranks(launcher: Any, tiny: Path) -> None:
    def run(llm: LLM) -> None:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=1.0, seed=1 + (rank() == 2), max_tokens=5))

    for text in told(launcher, 4, run, tiny, 2, 2):
        assert "rank 2 is at adding request '0@0' with 3 prompt tokens" in text
        assert text.count("max_tokens=5 (parameters' sum ") == 2


def test_a_rank_steps_where_another_adds(launcher: Any, tiny: Path) -> None:
    def run(llm: LLM) -> None:
        engine = llm.engine
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, TEN)
        engine.step()
        if rank():
            engine.add_request("b", {"prompt_token_ids": [5, 6, 7]}, TEN)
        engine.step()

    for text in told(launcher, 2, run, tiny):
        assert "rank 0 is at step 2 (1 request, 1 tokens)" in text
        assert "rank 1 is at adding request 'b@1'" in text


def test_an_abort_on_one_rank(launcher: Any, tiny: Path) -> None:
    def run(llm: LLM) -> None:
        engine = llm.engine
        for name in "ab":
            engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, TEN)
        engine.step()
        if not rank():
            engine.abort_request("a")
        engine.step()

    for text in told(launcher, 2, run, tiny):
        assert "rank 0 is at aborting the requests a@0" in text
        assert "rank 1 is at step 2 (2 requests, 2 tokens)" in text


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_scheduler_that_decides_by_itself(launcher: Any, tiny: Path, tp: int, pp: int) -> None:
    class Moody:
        def chunk_tokens(self, request: Any, remaining: int, context: Any) -> int:
            return 20 + 7 * rank()

    def run(llm: LLM) -> None:
        llm.engine.client.core.scheduler.policies.chunk = Moody()  # type: ignore[attr-defined]
        llm.generate([{"prompt_token_ids": [5] * 50}, {"prompt_token_ids": [6] * 30}], TEN)

    for text in told(launcher, 2, run, tiny, tp, pp):
        assert "rank 0 is at step 1 (2 requests, 40 tokens); rank 1 is at step 1 (2 requests, 54 tokens)" in text
        assert "what differs: num_scheduled_tokens" in text


@pytest.mark.parametrize(("tp", "pp", "odd", "found"), [(2, 1, 1, "ranks 0, 1"), (2, 2, 3, "ranks 2, 3")])
def test_a_rank_that_samples_other_tokens(launcher: Any, tiny: Path, tp: int, pp: int, odd: int, found: str) -> None:
    def run(llm: LLM) -> None:
        def tamper(worker: Any) -> None:
            if worker.world.rank == odd:
                sample = worker.runner.sampler.sample

                def other(*args: Any) -> Any:
                    sampled = sample(*args)
                    sampled.token_ids[0] ^= 1
                    return sampled

                worker.runner.sampler.sample = other

        llm.collective_rpc(tamper)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, TEN)

    for text in told(launcher, tp * pp, run, tiny, tp, pp):
        assert f"step 1 (1 request, 3 tokens): {found} should have the same tokens, and have not" in text


def test_different_calls(launcher: Any, tiny: Path) -> None:
    def run(llm: LLM) -> None:
        with pytest.raises(DriftError, match=r"rank 0 is at .*'layer_range'\); rank 1 is at .*'check_health'\)"):
            llm.collective_rpc("check_health" if rank() else "layer_range")
        llm.generate("more", TEN)

    for text in told(launcher, 2, run, tiny):
        assert "rank 0 is at collective_rpc('layer_range')" in text


def test_a_rank_that_leaves(launcher: Any, tiny: Path) -> None:
    def run() -> str:
        with open_llm(tiny) as llm:
            llm.generate("first", TEN)
            if rank():
                return "left"
            try:
                llm.generate("second", TEN)
            except EngineDeadError as error:
                return str(error.cause)
            return "nothing"

    text, left = launcher(2, run)
    assert left == "left"
    assert text.startswith("rank 1 has shut its engine down, and rank 0 waits for it: adding request '1@1'")


def test_an_engine_that_is_forgotten(launcher: Any, tiny: Path) -> None:
    """Nobody shuts it down, as where a script just ends."""

    def run() -> str:
        llm = open_llm(tiny)
        llm.generate("first", TEN)
        if rank():
            del llm
            gc.collect()
            return "forgotten"
        try:
            llm.generate("second", TEN)
        except EngineDeadError as error:
            return str(error.cause)
        return "nothing"

    text, forgotten = launcher(2, run)
    assert forgotten == "forgotten"
    assert "rank 1 has shut its engine down" in text
