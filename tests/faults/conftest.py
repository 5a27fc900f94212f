"""Engines of two ranks that break at a set moment, and what must be left of them: nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pegboard import LLM, SamplingParams
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.faulty_worker import order
from pegboard.testing.ranked_model import RankedPlugin

SOON = 10.0
"""Seconds within which a fault must be told and everything be gone."""

WORKER = "pegboard.testing.faulty_worker:FaultyWorker"


class Engine:
    """One faulty engine in this process: ``open`` boots it."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.pids: list[int] = []

    def open(self, *, step_timeout: float | None = 1.0, **mp: Any) -> LLM:
        self.llm = LLM(
            "scripted",
            plugins={"ranked": RankedPlugin(), "executor_mp": {"preload": [], **mp}},
            executor={"name": "mp", "worker": WORKER, "tensor_parallel_size": 2, "step_timeout": step_timeout},
            kv_cache={"num_blocks": 256},
            max_model_len=1024,
        )
        self.pids = self.llm.collective_rpc(lambda worker: os.getpid())
        return self.llm

    def generate(self, prompts: int = 3) -> list[list[int]]:
        assert self.llm is not None
        params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(["same prompt"] * prompts, params)]

    def break_while_generating(self) -> tuple[BaseException, list[BaseException]]:
        """Generate, twice, while another thread makes calls; what either of them got, which has to come soon."""
        assert self.llm is not None
        errors: dict[str, BaseException] = {}
        executor = self.llm.engine.client.core.executor  # type: ignore[attr-defined]

        def caught(name: str, work: Callable[[], Any]) -> None:
            try:
                while True:
                    work()
            except BaseException as error:
                errors[name] = error

        calls = {"generate": self.generate, "call": lambda: executor.collective_rpc(lambda worker: None)}
        threads = [threading.Thread(target=caught, args=call, daemon=True) for call in calls.items()]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SOON
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
        assert set(errors) == set(calls), f"nobody told {set(calls) - set(errors)}"
        return errors["generate"], [errors["call"]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers that answers at length."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, nothing_left: Callable[..., None]) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    if engine.llm is not None:
        engine.llm.shutdown()
    nothing_left(engine.pids)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``breaks(rank, at, what)``: order a fault of the engine that is opened next."""

    def breaks(rank: int, at: str, what: str) -> None:
        for name, value in order(rank, at, what).items():
            monkeypatch.setenv(name, value)

    return breaks


@pytest.fixture
def nothing_left() -> Callable[..., None]:
    """``nothing_left(pids, owner=…)``: soon there is no process of these any more, no child of ``owner`` (this process, unless
    said otherwise) that there was not before the test, and nothing of theirs in shared memory."""
    before = psutil.Process().children(recursive=True)

    def check(pids: Iterable[int], owner: int | None = None) -> None:
        owner = os.getpid() if owner is None else owner
        mine = [owner, *pids]

        def left() -> list[Any]:
            names = [f"pegboard-{kind}-{pid}-" for kind in ("mq", "mp") for pid in mine]
            files = [name for name in os.listdir("/dev/shm") if name.startswith(tuple(names))]
            children = psutil.Process(owner).children(recursive=True) if psutil.pid_exists(owner) else []
            new = [child for child in children if child not in before]
            return [*files, *new, *(pid for pid in pids if psutil.pid_exists(pid))]

        end = time.monotonic() + SOON
        while remains := left():
            assert time.monotonic() < end, f"left over: {remains}"
            time.sleep(0.01)

    return check
