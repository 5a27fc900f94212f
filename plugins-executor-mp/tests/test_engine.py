"""The standard worker in processes of its own: the same answers as in the engine's process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.engine.errors import RequestFailed
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.wire import StructuredOutputs

pytestmark = pytest.mark.slow
OpenLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture
def open_llm(tiny: Path) -> Iterator[OpenLLM]:
    opened: list[LLM] = []

    def open_(executor: str, **options: Any) -> LLM:
        settings = {"name": executor, "num_threads": 1}
        opened.append(LLM(str(tiny), dtype="float32", executor=settings, kv_cache={"num_blocks": 200}, **options))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()


def answers(llm: LLM) -> list[Any]:
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(4, 1000) for _ in range(length)]} for length in (1, 7, 33, 150)]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.0, seed=7, max_tokens=25, logit_bias={5: 3.0}, frequency_penalty=0.5),
    ]
    outputs = llm.generate(prompts, params)
    return [[(list(answer.token_ids), answer.text, answer.finish_reason) for answer in output.outputs] for output in outputs]


def test_answers_equal_those_of_uniproc(open_llm: OpenLLM) -> None:
    expected = answers(open_llm("uniproc"))
    mp = open_llm("mp")
    assert answers(mp) == expected
    assert mp.collective_rpc(lambda worker: os.getpid()) != [os.getpid()]


def test_grammars_are_masked_in_the_rank(open_llm: OpenLLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputs(choice=["yes, it is", "no"]))
    texts = [open_llm(name).generate(["Is it?", "Or is it?"], params) for name in ("uniproc", "mp")]
    told = [[output.outputs[0].text for output in outputs] for outputs in texts]
    assert told[0] == told[1]
    assert set(told[1]) <= {"yes, it is", "no"}


def test_calls_from_a_thread_change_no_answer(open_llm: OpenLLM) -> None:
    llm = open_llm("mp")
    quiet, replies = answers(llm), []
    executor = llm.engine.client.core.executor  # type: ignore[attr-defined]

    def call() -> None:
        for number in range(100):
            replies.extend(executor.collective_rpc(lambda worker, x: x, (number,), timeout=60))

    thread = threading.Thread(target=call)
    thread.start()
    loud = answers(llm)
    thread.join(60)
    assert loud == quiet
    assert replies == list(range(100))


def test_long_prompts_and_large_parameters(open_llm: OpenLLM) -> None:
    """A step whose plan is larger than the queue."""
    options = {"plugins": {"executor_mp": {"chunk_bytes": 1024, "num_chunks": 2}}}
    bias = {token: 0.001 * token for token in range(1000)}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias=bias)
    prompts = [{"prompt_token_ids": [5 + number] * 500} for number in range(8)]
    told = [open_llm(name, **more).generate(prompts, params) for name, more in (("uniproc", {}), ("mp", options))]
    assert [output.outputs[0].token_ids for output in told[0]] == [output.outputs[0].token_ids for output in told[1]]


def test_requests_that_are_refused_leave_the_engine_alone(open_llm: OpenLLM) -> None:
    llm = open_llm("mp")
    with pytest.raises(RequestFailed):
        llm.generate({"prompt_token_ids": [5] * 5000})
    assert len(llm.generate("go on", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_the_engines_process_needs_no_torch(tiny: Path) -> None:
    """Which takes a second to import, and a hundred megabytes."""
    script = (
        "import sys; from pegboard import LLM\n"
        f"llm = LLM({str(tiny)!r}, executor='mp', kv_cache={{'num_blocks': 50}})\n"
        "llm.generate('a prompt'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
