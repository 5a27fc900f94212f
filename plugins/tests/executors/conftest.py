"""Processes as a launcher starts them: one per rank, with its variables. They stay, and run one function after another."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from pegboard import LLM, SamplingParams
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.faulty_worker import VARIABLE as FAULTS
from pegboard.testing.rank_pool import RankPool

PATIENCE = 90.0
"""Seconds after which a function counts as hung."""
MEETING = 45.0
"""Seconds that ranks wait for one that has failed before it met them."""
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
)
"""Those that decide where a rank is; set for each function anew, as is that of the faults that it is to have."""


def rank() -> int:
    """Of the process that asks."""
    return int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def open_llm(folder: Path, tp: int = 2, pp: int = 1, *, name: str = "external_launcher", **options: Any) -> LLM:
    executor = {"name": name, "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "num_threads": 1}
    executor |= options.pop("executor", {})
    return LLM(str(folder), **{"dtype": "float32", "kv_cache": {"num_blocks": 200}, "executor": executor, **options})


def tokens(folder: Path, tp: int = 2, pp: int = 1, **options: Any) -> list[int]:
    with open_llm(folder, tp, pp, **options) as llm:
        return spoken(llm)


def spoken(llm: LLM) -> list[int]:
    """Its answer to the question that all get."""
    return list(llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(10))[0].outputs[0].token_ids)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def leftovers(pids: set[int]) -> list[str]:
    """What engines of these processes have left in shared memory."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("pegboard-launched-")]
    return [name for name in names if int(name.split("-")[3]) in pids]


class Launcher:
    """``launcher(ranks, function, *args)`` runs ``function(*args)`` on ranks 0 to ``ranks`` - 1, returns what they return, and
    raises what they raise. With ``outcomes`` it returns whatever comes of each. ``more``: variables by rank, or for all."""

    def __init__(self) -> None:
        self._pool = RankPool(4, preload=("torch", "pegboard", "pegboard_plugins.executors.external_launcher"))
        self._runs = itertools.count()
        self.pids: set[int] = set()
        self.close = self._pool.close

    def __call__(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        outcomes: bool = False,
        more: dict[str, str] | Sequence[dict[str, str]] = (),
    ) -> list[Any]:
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared["TORCHELASTIC_RUN_ID"] = str(next(self._runs))
        shared["PEGBOARD_PLUGINS__STANDARD__LAUNCH_TIMEOUT"] = str(MEETING)
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])  # a test's module cannot be imported there
        by_rank = [more] * ranks if isinstance(more, dict) else list(more) or [{}] * ranks
        calls = [(_with, {**shared, "RANK": str(rank), **by_rank[rank]}, function, args) for rank in range(ranks)]
        try:
            return self._pool.outcomes(calls, PATIENCE) if outcomes else self._pool.run(calls, PATIENCE)
        finally:
            self.pids |= {process.pid for process, _ in self._pool._ranks}


def _with(env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    for name in (*VARIABLES, FAULTS):
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in env.items() if value})
    return function(*args)


@pytest.fixture(scope="session")
def launched_processes() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def launcher(launched_processes: Launcher) -> Iterator[Launcher]:
    """Nothing may be left in shared memory."""
    yield launched_processes
    assert leftovers(launched_processes.pids) == []


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, two key heads, four layers, a byte-level tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=4, max_position_embeddings=512)


@pytest.fixture
def wanted(tiny: Path) -> list[int]:
    """What one rank says."""
    return tokens(tiny, 1, name="uniproc")


@pytest.fixture
def run_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_command(module, *arguments)``, as no rank."""

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *arguments]
        env = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env, check=False)

    return run
