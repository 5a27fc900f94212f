"""The standard worker on actors: the same tokens as in the engine's process, whatever is asked for."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.wire import StructuredOutputs

pytestmark = pytest.mark.slow
OpenLLM = Callable[..., LLM]

TIGHT = 14
"""Blocks of 16 tokens: room for some of the requests only."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def open_llm(tiny: Path) -> Iterator[OpenLLM]:
    opened: list[LLM] = []

    def open_(executor: str, tp: int = 1, pp: int = 1, num_blocks: int = 200) -> LLM:
        settings = {"name": executor, "num_threads": 1, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        blocks, plugins = {"num_blocks": num_blocks, "block_size": 16}, {"executor_ray": {"num_cpus": 0.1}}
        opened.append(LLM(str(tiny), dtype="float32", executor=settings, kv_cache=blocks, plugins=plugins))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()


@pytest.fixture(scope="module")
def expected(open_llm: OpenLLM) -> list[Any]:
    return answers(open_llm("uniproc"))


def answers(llm: LLM) -> list[Any]:
    """Greedy, seeded, several samples each, log-probabilities, a grammar: all at once, in a pool that may be too small."""
    rng = random.Random(0)
    lengths = (1, 7, 33, 150, 90, 20, 5, 6, 7, 8)
    prompts = [{"prompt_token_ids": [rng.randrange(4, 1000) for _ in range(length)]} for length in lengths]
    grammar = StructuredOutputs(choice=["yes, it is", "no"])
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.0, seed=7, max_tokens=25, ignore_eos=True, logit_bias={5: 3.0}, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, structured_outputs=grammar),
        *[SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 4,
    ]
    outputs = llm.generate(prompts, params)
    return [[(list(answer.token_ids), answer.text, answer.finish_reason) for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_answers_equal_those_of_uniproc(tp: int, pp: int, open_llm: OpenLLM, expected: list[Any]) -> None:
    """Also while another thread makes calls, and while requests are preempted."""
    llm = open_llm("ray", tp, pp, num_blocks=TIGHT)
    assert answers(llm) == expected
    assert llm.stats().num_preemptions > 0
    replies: list[int] = []
    executor = llm.engine.client.core.executor  # type: ignore[attr-defined]

    def call() -> None:
        for number in range(100):
            replies.extend(executor.collective_rpc(lambda worker, x: x, (number,), timeout=60, ranks=[number % 2]))

    thread = threading.Thread(target=call)
    thread.start()
    loud = answers(llm)
    thread.join(60)
    assert loud == expected
    assert replies == list(range(100))
    pids = llm.collective_rpc(lambda worker: os.getpid())
    assert len({*pids, os.getpid()}) == 3
