"""The standard worker on actors that the queue leads to: the same tokens as in the engine's process."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from pegboard import LLM, SamplingParams
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.wire import StructuredOutputs
from pegboard_executor_mp.queue.remote_reader import RemoteReader

pytestmark = pytest.mark.slow
OpenLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Any]:
    llm = opened(tiny, "uniproc")
    try:
        return answers(llm)
    finally:
        llm.shutdown()


@pytest.fixture
def open_llm(tiny: Path) -> Iterator[OpenLLM]:
    made: list[LLM] = []

    def open_(tp: int, pp: int, **options: Any) -> LLM:
        made.append(opened(tiny, "ray-mq", tp, pp, {"executor_ray": options}))
        return made[-1]

    yield open_
    for llm in made:
        llm.shutdown()


def opened(folder: Path, executor: str, tp: int = 1, pp: int = 1, plugins: dict[str, Any] | None = None) -> LLM:
    """Room for some of the requests of ``answers`` only."""
    settings = {"name": executor, "num_threads": 1, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    cache = {"num_blocks": 14, "block_size": 16}
    return LLM(str(folder), dtype="float32", executor=settings, kv_cache=cache, plugins=plugins or {})


def answers(llm: LLM) -> list[Any]:
    """Greedy, seeded, several samples each, log-probabilities, a grammar: all at once."""
    rng = random.Random(0)
    lengths = (1, 7, 33, 150, 90, 20, 5, 6, 7, 8)
    prompts = [{"prompt_token_ids": [rng.randrange(4, 1000) for _ in range(length)]} for length in lengths]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.0, seed=7, max_tokens=25, ignore_eos=True, logit_bias={5: 3.0}, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputs(choice=["yes, it is", "no"])),
        *[SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 4,
    ]
    outputs = llm.generate(prompts, params)
    return [[(list(answer.token_ids), answer.text, answer.finish_reason) for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_answers_equal_those_of_uniproc(tp: int, pp: int, far: bool, open_llm: OpenLLM, expected: list[Any]) -> None:
    """On one node and on two, while another thread makes calls, and while requests are preempted."""
    options: dict[str, Any] = {"strategy": "STRICT_SPREAD"} if far else {"resources": {"near": 1}}
    llm = open_llm(tp, pp, **options)
    executor = llm.engine.client.core.executor  # type: ignore[attr-defined]
    assert len(set(llm.collective_rpc(lambda worker: ray.get_runtime_context().get_node_id()))) == 1 + far
    assert [isinstance(reader, RemoteReader) for reader in executor._fleet._readers] == [False, far]
    replies: list[int] = []

    def call() -> None:
        for number in range(100):
            replies.extend(executor.collective_rpc(lambda worker, x: x, (number,), timeout=60, ranks=[number % 2]))

    thread = threading.Thread(target=call)
    thread.start()
    spoken = answers(llm)
    thread.join(60)
    assert spoken == expected
    assert llm.stats().num_preemptions > 0
    assert replies == list(range(100))
    assert len({*llm.collective_rpc(lambda worker: os.getpid()), os.getpid()}) == 3
