"""Ranks that share the layers of a real model break: the others, who wait for them in a collective, do not hang."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.engine.errors import EngineDeadError
from pegboard.engine.outputs import OutputKind
from pegboard.testing.distributions import forget_modules, write_distribution

pytestmark = pytest.mark.slow
NothingLeft = Callable[..., None]
OpenTiny = Callable[..., LLM]
Last = Callable[..., BaseException]

PATIENCE = 15.0
"""Seconds within which everybody who waits must be told."""

PLUGIN = """
    from pegboard.plugins import AttentionBackendProvider, hookimpl

    place = {}

    @hookimpl
    def worker_starting(context):
        place["rank"] = context.world.rank

    @hookimpl
    def attention_backends():
        yield AttentionBackendProvider(name="failing", target="acme_failing.backend:FailingAttention", priority=-1)
"""
BACKEND = """
    import os

    from acme_failing.plugin import place
    from pegboard_plugins.attention.torch_backend import TorchAttentionBackend

    class FailingAttention(TorchAttentionBackend):
        num_calls = 0

        def forward(self, *args):
            self.num_calls += 1
            if self.num_calls == 20 and str(place["rank"]) in os.environ["ACME_FAILS"]:
                raise RuntimeError("boom-17")
            return super().forward(*args)
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that offers an attention backend: its 20th forward raises on the ranks in ``ACME_FAILS``."""
    modules = {"acme_failing.plugin": PLUGIN, "acme_failing.backend": BACKEND}
    write_distribution(tmp_path / "site", "acme-failing", modules, {"acme_failing": "acme_failing.plugin"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    forget_modules(list(modules))


@pytest.fixture
def open_tiny(tiny: Path, nothing_left: NothingLeft) -> Iterator[OpenTiny]:
    """``open_tiny(communicator, step_timeout, config fields)``: two ranks; nothing of them may be left after the test."""
    opened: list[LLM] = []
    pids: list[int] = []

    def open_(communicator: str = "auto", step_timeout: float | None = None, **options: Any) -> LLM:
        executor = {"name": "mp", "tensor_parallel_size": 2, "num_threads": 1, "communicator": communicator}
        executor["step_timeout"] = step_timeout
        opened.append(LLM(str(tiny), dtype="float32", executor=executor, kv_cache={"num_blocks": 400}, **options))
        pids.extend(opened[-1].collective_rpc(lambda worker: os.getpid()))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()
    nothing_left(pids)


def outcome(work: Callable[[], Any]) -> Any:
    """What ``work`` returns or raises, which has to come in time."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it hangs"
    return found[0]


def is_dead(llm: LLM) -> None:
    """Whoever asks is refused at once, with the same cause."""
    for ask in (llm.engine.check_health, llm.engine.step, lambda: llm.generate("one more"), llm.stats):
        assert isinstance(outcome(ask), EngineDeadError)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(("rank", "communicator"), [(0, "torch_distributed"), (1, "shared_memory")])
def test_a_rank_is_killed_in_the_middle_of_a_stream(
    rank: int, communicator: str, open_tiny: OpenTiny, nothing_left: NothingLeft, caplog: pytest.LogCaptureFixture
) -> None:
    llm = open_tiny(communicator)
    pids = llm.collective_rpc(lambda worker: os.getpid())
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    llm.engine.add_request("stream", "go on and on", params, kind=OutputKind.DELTA)
    chunks = [output for _ in range(6) for output in llm.engine.step()]
    assert len(chunks) >= 5
    os.kill(pids[rank], signal.SIGKILL)

    def read_on() -> None:
        while llm.engine.has_unfinished_requests():
            chunks.extend(llm.engine.step())

    error = outcome(read_on)
    assert isinstance(error, EngineDeadError)
    assert isinstance(error.__cause__, ExecutorFailed)
    told = f"worker rank {rank} (process {pids[rank]}) was ended by SIGKILL"
    assert told in str(error)
    assert f"the executor has failed: {told}" in caplog.text
    assert not any(chunk.finished for chunk in chunks), "no clean end"
    is_dead(llm)
    nothing_left(pids)


def test_a_rank_is_frozen_in_the_middle_of_a_stream(open_tiny: OpenTiny, nothing_left: NothingLeft) -> None:
    """The other one waits for it in a collective, so neither answers."""
    llm = open_tiny(step_timeout=2.0)
    pids = llm.collective_rpc(lambda worker: os.getpid())
    llm.engine.add_request("stream", "go on and on", SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True))
    for _ in range(6):
        llm.engine.step()
    os.kill(pids[1], signal.SIGSTOP)

    def read_on() -> None:
        while llm.engine.has_unfinished_requests():
            llm.engine.step()

    error = outcome(read_on)
    assert isinstance(error, EngineDeadError)
    assert isinstance(error.__cause__, TimeoutError)
    assert "executor.step_timeout=2.0 s: no answer from ranks 0, 1" in str(error)
    is_dead(llm)
    nothing_left(pids)


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize(
    ("ranks", "communicator"),
    [({1}, "shared_memory"), ({0}, "shared_memory"), ({0, 1}, "shared_memory"), ({1}, "torch_distributed")],
    ids=["1", "0", "both", "1-torch"],
)
def test_an_attention_backend_raises(
    ranks: set[int],
    communicator: str,
    open_tiny: OpenTiny,
    nothing_left: NothingLeft,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ACME_FAILS", ",".join(map(str, ranks)))
    llm = open_tiny(communicator, attention={"backend": "failing"})
    pids = llm.collective_rpc(lambda worker: os.getpid())
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    error = outcome(lambda: llm.generate(["first", "second", "third"], params))
    assert isinstance(error, EngineDeadError)
    cause = error.__cause__
    assert isinstance(cause, WorkerError)
    assert cause.rank in ranks
    assert (cause.error_type, cause.message) == ("RuntimeError", "boom-17")
    assert "acme_failing/backend.py" in cause.traceback_text
    is_dead(llm)
    nothing_left(pids)
    told = capfd.readouterr().err
    for rank in (0, 1):
        assert told.count(f"[rank {rank}] RuntimeError: boom-17") == (rank in ranks)
    assert told.count("acme_failing/backend.py") == told.count("Traceback (most") == len(ranks), "nothing else hides the cause"
    if communicator == "shared_memory" and ranks == {1}:  # the same process can start anew
        assert len(open_tiny(communicator).generate("again", params)[0].outputs[0].token_ids) == 100
