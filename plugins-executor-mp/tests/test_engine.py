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

    def open_(executor: str, ranks: int = 1, **options: Any) -> LLM:
        settings = {"name": executor, "num_threads": 1, "tensor_parallel_size": ranks}
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


@pytest.mark.parametrize(("executor", "ranks"), [("uniproc", 1), ("mp", 2)])
def test_calls_from_a_thread_change_no_answer(executor: str, ranks: int, open_llm: OpenLLM) -> None:
    llm = open_llm(executor, ranks)
    quiet, replies = answers(llm), []
    core = llm.engine.client.core  # type: ignore[attr-defined]

    def call() -> None:
        for number in range(100):
            replies.append(core.executor.collective_rpc(lambda worker, x: x, (number,), timeout=60))

    thread = threading.Thread(target=call)
    thread.start()
    loud = answers(llm)
    thread.join(60)
    assert loud == quiet
    assert replies == [[number] * ranks for number in range(100)]


def test_long_prompts_and_large_parameters(open_llm: OpenLLM) -> None:
    """A plan of a megabyte through a queue of two kilobytes."""
    options = {"ranks": 2, "plugins": {"executor_mp": {"chunk_bytes": 1024, "num_chunks": 2}}}
    rng = random.Random(0)
    params = SamplingParams(
        temperature=0,
        max_tokens=5,
        ignore_eos=True,
        logit_bias={token: 0.001 * token for token in range(1000)},
        bad_words=tuple("".join(rng.choices("abcdefgh ", k=150)) for _ in range(700)),
        stop=("never said" * 100_000,),
    )
    prompts = [{"prompt_token_ids": [5 + number] * 505} for number in range(2)]
    one, several = open_llm("uniproc"), open_llm("mp", **options)
    told = [[output.outputs[0].token_ids for output in llm.generate(prompts, params)] for llm in (one, several)]
    assert told[0] == told[1]
    assert answers(several) == answers(one)


@pytest.mark.parametrize(("executor", "ranks"), [("uniproc", 1), ("mp", 2)])
def test_workers_can_sleep_as_soon_as_all_is_said(executor: str, ranks: int, open_llm: OpenLLM) -> None:
    """They are told of the end of the last requests before, and what blocks held is forgotten."""
    llm = open_llm(executor, ranks)
    said = answers(llm)
    llm.collective_rpc("sleep", (2,))
    assert llm.collective_rpc(lambda worker: len(worker.runner.cache.device_caches)) == [0] * ranks
    llm.collective_rpc("wake_up", (None,))
    assert answers(llm) == said


def test_the_command_line_in_a_small_shared_memory(tiny: Path, run_with_shm: Callable[..., Any]) -> None:
    """What other processes share in there beside the queues fits as well."""
    command = [sys.executable, "-m", "pegboard.entrypoints.cli.main", "generate", str(tiny), "--raw", "-p", "go", "-n", "5"]
    for setting in ("executor.name=mp", "executor.tensor_parallel_size=2", "executor.num_threads=1", "kv_cache.num_blocks=50"):
        command += ["--set", setting]
    done = run_with_shm(16, command)
    assert (done.returncode, done.stdout.strip() != "") == (0, True), done.stderr
    refused = run_with_shm(16, [*command, "--set", "plugins.executor_mp.num_chunks=40"])
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Traceback" not in refused.stderr
    for part in ("with 40 chunks of ", "bytes of shared memory", "has 16777216 bytes free", "lower plugins.executor_mp."):
        assert part in refused.stderr


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
