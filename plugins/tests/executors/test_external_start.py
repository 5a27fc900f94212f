"""How ranks that a launcher has started find one another, and what keeps them from starting together."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard.engine.errors import EngineStartError

from .conftest import VARIABLES, free_port, open_llm, rank, spoken, tokens

slow = pytest.mark.slow


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# -- without a launcher, and with one that says something wrong ----------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("", "neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS are set, .* torchrun --nproc-per-node 2 script.py"),
        ("RANK=0", "WORLD_SIZE is not set; set it to the number of processes, 2 here"),
        ("WORLD_SIZE=2", "RANK is not set; set it to this process's number, from 0 to 1"),
        ("RANK=0 WORLD_SIZE=two", "WORLD_SIZE='two' is no integer"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0 must be at least 1"),
        (
            "RANK=0 WORLD_SIZE=3",
            r"WORLD_SIZE=3, but the configuration asks for 2 ranks \(executor.tensor_parallel_size x "
            r"executor.pipeline_parallel_size = 2 x 1\)",
        ),
        ("RANK=x WORLD_SIZE=2", "RANK='x' is no integer"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2 must be from 0 to 1"),
        ("RANK=-1 WORLD_SIZE=2", "RANK=-1 must be from 0 to 1"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=5", "LOCAL_RANK=5 must be from 0 to 1"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=a", "LOCAL_RANK='a' is no integer"),
        ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR is not set; .* or give plugins.standard.launch_address='host:port'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=", "MASTER_ADDR is empty"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost", "MASTER_PORT is not set; set it to a free port of localhost"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=0", "MASTER_PORT=0 must be from 1 to 65535"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=99999", "MASTER_PORT=99999 must be from 1 to 65535"),
        ("SLURM_PROCID=7 SLURM_NTASKS=2", "SLURM_PROCID=7 must be from 0 to 1"),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", "SLURM_NTASKS=4, but the configuration asks for 2 ranks"),
    ],
)
def test_wrong_environments(tiny: Path, bare: pytest.MonkeyPatch, env: str, text: str) -> None:
    for assignment in env.split():
        bare.setenv(*assignment.split("=", 1))
    with pytest.raises(EngineStartError, match=text):
        open_llm(tiny)


@pytest.mark.parametrize("address", ["host", "host:", ":5", "host:x", "host:70000"])
def test_wrong_addresses(tiny: Path, bare: pytest.MonkeyPatch, address: str) -> None:
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(EngineStartError, match=f"plugins.standard.launch_address='{address}' must be 'host:port'"):
        open_llm(tiny, plugins={"standard": {"launch_address": address}})


def test_a_port_that_is_taken(tiny: Path, bare: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": taken.getsockname()[1],
        }.items():
            bare.setenv(name, str(value))
        with pytest.raises(EngineStartError, match=r"rank 0 cannot listen at 127.0.0.1:\d+.*in use.*MASTER_ADDR and MASTER_PORT"):
            open_llm(tiny)


@pytest.mark.parametrize(("number", "missing"), [(0, "rank 1"), (1, "MASTER_ADDR and MASTER_PORT")])
def test_a_rank_that_does_not_come(tiny: Path, bare: pytest.MonkeyPatch, number: int, missing: str) -> None:
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {"RANK": number, **shared}.items():
        bare.setenv(name, str(value))
    with pytest.raises(EngineStartError, match=missing):
        open_llm(tiny, plugins={"standard": {"launch_timeout": 0.5}})


def test_one_rank_meets_nobody(tiny: Path, bare: pytest.MonkeyPatch, wanted: list[int]) -> None:
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "1")
    assert tokens(tiny, 1) == wanted


def test_auto_never_means_it(tiny: Path, bare: pytest.MonkeyPatch) -> None:
    from pegboard.config import EngineConfig
    from pegboard.plugins import PluginError, PluginHost, compose

    config = EngineConfig(model=str(tiny), executor={"tensor_parallel_size": 2}, plugins={"allow": []})  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"pip install pegboard-executor-mp; .* external_launcher \(name one"):
        compose(config, PluginHost.load(config.plugins))


# -- launchers -----------------------------------------------------------------------------------------------------------


@slow
def test_slurm(launcher: Any, tiny: Path, wanted: list[int]) -> None:
    """srun says who is who; where they meet is an option here."""
    more = [{"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": "", **_slurm(number)} for number in range(2)]
    options = {"plugins": {"standard": {"launch_address": f"localhost:{free_port()}"}}}

    def run() -> Any:
        with open_llm(tiny, **options) as llm:
            return spoken(llm), llm.collective_rpc(lambda worker: (worker.world.rank, worker.world.local_rank))

    assert launcher(2, run, more=more) == [(wanted, [(0, 0), (1, 1)])] * 2


def _slurm(number: int) -> dict[str, str]:
    return {"SLURM_PROCID": str(number), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(number)}


@slow
def test_restarts_under_one_store(launcher: Any, tiny: Path, wanted: list[int]) -> None:
    """torchrun's agent serves the store, which outlives the ranks; what killed ranks left there misleads nobody."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}

    def killed() -> None:
        import signal

        from pegboard_plugins.executors.launched import meeting

        call_on = meeting._Meeting._call_on

        def die(self: Any, other: int) -> Any:
            call_on(self, other)
            os.kill(os.getpid(), signal.SIGKILL)

        meeting._Meeting._call_on = die  # type: ignore[method-assign]
        try:
            open_llm(tiny, plugins={"standard": {"launch_timeout": 1.0}})
        finally:
            meeting._Meeting._call_on = call_on  # type: ignore[method-assign]

    def anew() -> list[int]:
        from pegboard_plugins.executors.launched import meeting

        meeting._engines.clear()  # as in a new process
        return tokens(tiny)

    attempts = [{**agent, "TORCHELASTIC_RESTART_COUNT": number} for number in "001"]
    assert launcher(2, killed, outcomes=True, more=attempts[0])[1].signal
    for more in attempts[1:]:
        assert launcher(2, anew, more=more) == [wanted] * 2


@slow
@pytest.mark.parametrize("first", ["engine", "group"])
def test_beside_a_process_group_of_the_script(launcher: Any, tiny: Path, wanted: list[int], first: str) -> None:
    """Which meets at the same address, and is served by the same process."""

    def run() -> Any:
        import torch
        import torch.distributed as dist

        def sum_of_ranks() -> int:
            dist.init_process_group("gloo")
            total = torch.tensor([rank() + 1])
            dist.all_reduce(total)
            return int(total)

        try:
            if first == "group":
                return sum_of_ranks(), tokens(tiny)
            found = tokens(tiny)
            return sum_of_ranks(), found
        finally:
            dist.destroy_process_group()

    assert launcher(2, run) == [(3, wanted)] * 2


SCRIPT = """
import os, sys
from pegboard import LLM, SamplingParams

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
llm = LLM({folder!r}, dtype="float32", executor="external_launcher", tensor_parallel_size=2, kv_cache={{"num_blocks": 100}})
params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
first = llm.generate("one", params)[0].outputs[0].token_ids
if attempt == "0" and rank == 1:
    os.kill(os.getpid(), 9)
second = llm.generate("two", params)[0].outputs[0].token_ids
os.write(1, f"attempt {{attempt}}: {{list(first)}} {{list(second)}}\\n".encode())  # in one piece: both ranks write there
"""


@slow
def test_torchrun(run_command: Any, tiny: Path, tmp_path: Path) -> None:
    """A rank that is killed ends the other, and the launcher starts both anew."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tiny)))
    done = run_command("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(script))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("attempt 1: ")
    assert "rank 1 (process " in done.stderr
    assert " has ended" in done.stderr


@slow
def test_the_command_line(run_command: Any, tiny: Path) -> None:
    """One rank's output is enough."""
    launch = ["--standalone", "--nproc-per-node=2", "--local-ranks-filter=0", "--no-python"]
    pegboard = [str(Path(sys.executable).parent / "pegboard"), "generate", str(tiny), "--prompt", "Once", "--raw"]
    options = ["--temperature", "0", "--max-tokens", "6", "--dtype", "float32", "--kv-cache.num-blocks", "100"]
    ranks = ["--executor", "external_launcher", "--tensor-parallel-size", "2"]
    done = run_command("torch.distributed.run", *launch, *pegboard, *options, *ranks)
    assert done.returncode == 0, done.stderr
    with open_llm(tiny, 1, executor={"name": "uniproc"}) as llm:
        [alone] = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=6))
    assert done.stdout == alone.outputs[0].text + "\n"


@slow
def test_strangers_are_turned_away(launcher: Any, tiny: Path, wanted: list[int]) -> None:
    """Whoever connects to a rank that waits, and does not know the secret, says nothing, or says too much."""

    def run() -> Any:
        import threading

        from pegboard_plugins.executors.launched import meeting

        own_address, wait_for = meeting._own_address, meeting._Meeting._wait_for
        meeting._HELLO_SECONDS = 0.2  # type: ignore[misc]

        def disturbed(self: Any, ranks: Any, listener: Any) -> None:
            port = listener.getsockname()[1]
            said = [b"", b"\0\0\0\7abcdefg", b"\xff" * 50, b'\0\0\0\x0e["no", 1, 2, 3]']
            strangers = [socket.create_connection(("127.0.0.1", port)) for _ in said]
            for stranger, words in zip(strangers, said, strict=True):
                stranger.sendall(words)
            thread = threading.Timer(2.0, lambda: [stranger.close() for stranger in strangers])
            thread.start()
            wait_for(self, ranks, listener)
            thread.join()

        if rank() == 0:
            meeting._Meeting._wait_for = disturbed  # type: ignore[method-assign]
        else:
            meeting._own_address = lambda master: time.sleep(0.5) or own_address(master)  # type: ignore[assignment,func-returns-value]
        try:
            return tokens(tiny)
        finally:
            meeting._Meeting._wait_for, meeting._own_address = wait_for, own_address  # type: ignore[method-assign]
            meeting._HELLO_SECONDS = 5.0  # type: ignore[misc]

    assert launcher(2, run) == [wanted] * 2
