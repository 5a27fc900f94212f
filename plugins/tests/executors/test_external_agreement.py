"""What ranks that a launcher has started have to have in common, and what becomes of those on several hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pegboard.engine.errors import EngineStartError
from pegboard.testing.plugins import make_plugin

from .conftest import open_llm, rank, spoken, tokens

pytestmark = pytest.mark.slow


def test_different_configurations_are_refused_by_all(launcher: Any, tiny: Path) -> None:
    def run() -> Any:
        options: dict[str, Any] = {"max_model_len": 100 + rank(), "executor": {"num_threads": 1 + rank()}}
        options["plugins"] = {"standard": {"json_whitespace": "any" if rank() else "fixed"}}
        if rank():
            options["plugins"]["mine"] = make_plugin(engine_ready=lambda info: None)
        try:
            tokens(tiny, **options)
        except EngineStartError as error:
            return str(error)
        return "nothing"

    first, second = launcher(2, run)
    assert first == second
    assert "setting max_model_len: 100 on rank 0; 101 on rank 1" in first
    assert "setting plugins.standard.json_whitespace: 'fixed' on rank 0; 'any' on rank 1" in first
    assert "plugin mine: none on rank 0; " in first
    assert "num_threads" not in first
    assert len([line for line in first.splitlines() if line.startswith("  - ")]) == 3


def test_plugins_given_in_the_script_need_not_be_sent(launcher: Any, tiny: Path, wanted: list[int]) -> None:
    """Every rank has them; one that cannot be pickled is as good as any."""

    def run() -> Any:
        import threading

        plugin = make_plugin(engine_ready=lambda info: None)
        plugin.lock = threading.Lock()  # type: ignore[attr-defined]
        return tokens(tiny, plugins={"mine": plugin})

    assert launcher(2, run) == [wanted] * 2


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_several_hosts(launcher: Any, tiny: Path, wanted: list[int], tp: int, pp: int) -> None:
    """Ranks that believe to be on different ones share no memory: two on each where there are four."""

    def run() -> Any:
        from pegboard_plugins.communicators import peers
        from pegboard_plugins.executors.launched import agreement, cohort

        real = peers.this_host
        for module in (peers, agreement, cohort):
            module.this_host = lambda: f"host{rank() // pp}"  # type: ignore[attr-defined]
        try:
            with open_llm(tiny, tp, pp) as llm:
                return spoken(llm), llm.collective_rpc(
                    lambda worker: (
                        worker.world.local_rank,
                        worker.world.local_size,
                        worker.world.rendezvous.partition("://")[0],
                        type(worker.links.tp or worker.links.pp).__name__,
                    )
                )
        finally:
            for module in (peers, agreement, cohort):
                module.this_host = real  # type: ignore[attr-defined]

    places = [number % pp for number in range(tp * pp)]
    expected = [(place, pp, "tcp", "TorchDistributedCommunicator") for place in places]
    assert launcher(tp * pp, run) == [(wanted, expected)] * (tp * pp)


def test_a_communicator_for_one_host_is_refused_on_several(launcher: Any, tiny: Path) -> None:
    def run() -> Any:
        from pegboard_plugins.executors.launched import agreement

        real = agreement.this_host
        agreement.this_host = lambda: f"host{rank()}"
        try:
            open_llm(tiny, executor={"communicator": "shared_memory"})
        except EngineStartError as error:
            return str(error)
        finally:
            agreement.this_host = real

    for text in launcher(2, run):
        assert "'shared_memory' is for ranks on one host, and these are on several; name 'torch_distributed', or 'auto'" in text


def test_a_folder_that_one_rank_cannot_see(launcher: Any, tiny: Path, wanted: list[int]) -> None:
    """As in containers that share process ids, but not /dev/shm."""

    def run() -> Any:
        real = os.path.isdir
        os.path.isdir = lambda path: real(path) and not (rank() and "pegboard-launched" in str(path))  # type: ignore[assignment]
        try:
            with open_llm(tiny) as llm:
                return spoken(llm), llm.collective_rpc(lambda worker: worker.world.rendezvous[:6])
        finally:
            os.path.isdir = real

    assert launcher(2, run) == [(wanted, ["tcp://"] * 2)] * 2
