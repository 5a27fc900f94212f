"""What a rank's process is given: plugins, environment, cores, output, log; and what is refused before any is started."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from pegboard.contracts.executor import WorkerError
from pegboard.engine.errors import EngineStartError
from pegboard.plugins import Composition, PluginError
from pegboard_executor_mp import cores, launch
from pegboard_executor_mp.executor import MultiprocExecutor
from pegboard_executor_mp.options import Options

MakeExecutor = Callable[..., MultiprocExecutor]
ComposeMp = Callable[..., Composition]

# -- plugins -----------------------------------------------------------------------------------------------------------

NOTES_PIDS = """
    import os
    from pegboard.plugins import hookimpl, WorkerProvider

    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")

    @hookimpl
    def workers():
        return [WorkerProvider(name="acme", target="pegboard.testing.rpc_worker:RpcWorker")]
"""


def test_ranks_load_the_plugins_of_the_engine(make_executor: MakeExecutor, plugin_factory: Any, tmp_path: Path) -> None:
    """Each once, found where this process finds them."""
    notes = tmp_path / "pids"
    plugin_factory(NOTES_PIDS.format(path=str(notes)), name="acme")
    executor = make_executor(2, worker="acme")
    pids = executor.collective_rpc(lambda worker: os.getpid())
    assert sorted(map(int, notes.read_text().split())) == sorted([os.getpid(), *pids])


def test_another_version_of_a_plugin_is_refused(make_executor: MakeExecutor, compose_mp: ComposeMp, plugin_factory: Any) -> None:
    written = plugin_factory(NOTES_PIDS.format(path=os.devnull), name="acme")
    composition = compose_mp(2, worker="acme")
    metadata = next(written.metadata.glob("METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))
    with pytest.raises(WorkerError, match=r"(?s)PluginError: this process would not load the plugins.*acme.*version 2\.0"):
        composition.create("executor")


def test_plugins_that_cannot_be_sent_are_refused_with_a_remedy(compose_mp: ComposeMp) -> None:
    class HoldsALock:
        lock = threading.Lock()

    composition = compose_mp(2, plugins={"locked": HoldsALock()})
    with pytest.raises(PluginError, match=r"plugin 'locked' \(given directly\) cannot be sent.*entry point"):
        composition.create("executor")


# -- shared memory -----------------------------------------------------------------------------------------------------


def test_too_little_shared_memory_is_one_error_before_anything_starts(
    compose_mp: ComposeMp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.segment, "free_bytes", lambda: 5_000_000)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(EngineStartError) as caught:
        compose_mp(2).create("executor")
    text = str(caught.value)
    assert "3 message queues (2 ranks, and one to all) with 16 chunks of 266240 bytes need 12834816 bytes" in text
    assert "/dev/shm has 5000000 bytes free" in text
    assert "lower plugins.executor_mp.chunk_bytes or plugins.executor_mp.num_chunks" in text
    assert psutil.Process().children(recursive=True) == before
    options = {"chunk_bytes": "64K"}
    compose_mp(2, options=options).create("executor").shutdown()


SMALL = """
import os, pegboard
from pegboard.testing.ranked_model import RankedPlugin
llm = pegboard.LLM("scripted", max_model_len=64, plugins={"ranked": RankedPlugin(), "executor_mp": {"preload": [], %s}},
    executor={"name": "mp", "worker": "pegboard.testing.fakes:RunnerWorker", "tensor_parallel_size": 2})
options = llm.engine.composition.options("executor_mp")
for _ in range(100):
    data = os.urandom(options.chunk_bytes)
    assert llm.collective_rpc(lambda worker, data: data, (data,)) == [data, data]
print("all came back")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mebibytes", "options", "works"),
    [
        (8, "", False),
        (8, '"chunk_bytes": "100K"', True),  # of all three queues: else those of replies alone would take more
        (16, "", True),
        (16, '"num_chunks": 21', False),
    ],
)
def test_a_small_shared_memory(mebibytes: int, options: str, works: bool, run_with_shm: Callable[..., Any]) -> None:
    """Messages of a chunk's size, both ways."""
    done = run_with_shm(mebibytes, [sys.executable, "-c", SMALL % options])
    if works:
        assert (done.stdout, done.returncode) == ("all came back\n", 0), done.stderr
    else:
        assert done.returncode == 1
        assert "EngineStartError: 3 message queues (2 ranks, and one to all)" in done.stderr
        assert f"has {mebibytes << 20} bytes free" in done.stderr
        assert done.stderr.count("Traceback") == 1


# -- processes ---------------------------------------------------------------------------------------------------------


def test_ranks_are_named_have_no_input_and_see_the_environment(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACME_SETTING", "17")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_helper.py").write_text("value = 5")
    executor = make_executor(2)

    def look(worker: Any) -> Any:
        import acme_helper  # type: ignore[import-not-found]

        return os.environ["ACME_SETTING"], os.environ["PYTHONPATH"], sys.stdin.read(), acme_helper.value, os.getpid()

    *same, pids = zip(*executor.collective_rpc(look), strict=True)
    assert same == [("17", "17"), ("/nowhere", "/nowhere"), ("", ""), (5, 5)]
    assert [psutil.Process(pid).name() for pid in pids] == ["pegboard-rank0", "pegboard-rank1"]
    parents = {psutil.Process(pid).parent() for pid in pids}
    assert [parent.name() for parent in parents if parent] == ["pegboard-mp"]


def test_modules_of_the_current_folder_shadow_nothing(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("json", "socket", "cloudpickle"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert make_executor(2).collective_rpc(lambda worker: os.getcwd()) == [str(tmp_path)] * 2


def test_entries_of_the_import_path_that_are_no_text(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own import passes over them."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    executor = make_executor(1)
    assert executor.collective_rpc(lambda worker: sys.path) == [[entry for entry in sys.path if isinstance(entry, str)]]


CLOSED = """
import os
for fd in range(3):
    os.close(fd)
from pegboard import LLM
from pegboard.testing.ranked_model import RankedPlugin
llm = LLM("scripted", max_model_len=64, plugins={"ranked": RankedPlugin(), "executor_mp": {"preload": []}},
    executor={"name": "mp", "worker": "pegboard.testing.fakes:RunnerWorker", "tensor_parallel_size": 2})
found = llm.collective_rpc(lambda worker: [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)])
os.fdopen(os.open(os.environ["TO"], os.O_WRONLY | os.O_CREAT), "w").write(repr(found))
"""


def test_closed_standard_descriptors_are_given_to_nobody(tmp_path: Path) -> None:
    """As a daemon's may be: what a library prints would go into a queue or a socket."""
    script = tmp_path / "script.py"
    script.write_text(CLOSED)
    said = tmp_path / "said"
    done = subprocess.run([sys.executable, str(script)], env={**os.environ, "TO": str(said)}, timeout=60, check=False)
    assert done.returncode == 0
    assert eval(said.read_text()) == [["/dev/null"] * 3] * 2


def test_too_few_descriptors_leave_none_open(compose_mp: ComposeMp, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe2, calls = os.pipe2, []

    def refuse(flags: int) -> tuple[int, int]:
        calls.append(flags)
        if len(calls) == 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return pipe2(flags)

    composition = compose_mp(4)
    before = psutil.Process().num_fds()
    monkeypatch.setattr(os, "pipe2", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        composition.create("executor")
    assert psutil.Process().num_fds() == before


def test_spawned_ranks(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    executor = make_executor(2, options={"start_method": "spawn"})
    found = executor.collective_rpc(lambda worker: (worker.world.rank, os.environ.get("PYTHONPATH"), os.getppid()))
    assert [(rank, path) for rank, path, _ in found] == [(0, None), (1, None)]
    assert len({parent for _, _, parent in found}) == 1


def test_a_module_that_cannot_be_preloaded_is_no_matter(make_executor: MakeExecutor, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('odd-17')")
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = make_executor(1, options={"preload": ["acme_missing", "acme_broken", "wave"]})
    assert executor.collective_rpc(lambda worker: "wave" in sys.modules) == [True]


def test_what_ranks_print_and_log_reaches_stderr_with_their_number(
    make_executor: MakeExecutor, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.DEBUG, logger="acme.chatty")

    def speak(worker: Any) -> None:
        print("to stdout")
        sys.stderr.write("two\nlines, and half of")
        sys.stderr.write(" a third\n")
        os.write(1, b"native\n")
        logging.getLogger("acme.chatty").debug("told")
        logging.getLogger("acme.other").info("not told")
        sys.stderr.flush()

    executor = make_executor(2)
    executor.collective_rpc(speak)
    executor.shutdown()
    out, err = capfd.readouterr()
    assert out == ""
    for rank in range(2):
        lines = [line.removeprefix(f"[rank {rank}] ") for line in err.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines == ["to stdout", "two", "lines, and half of a third", "DEBUG acme.chatty: told"]
    assert err.splitlines().count("native") == 2


# -- cores -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``machine(cores, threads)``: so many cores, each with so many hardware threads, numbered as Linux does it."""

    def set_up(number: int, threads: int, quota: int | None = None) -> None:
        for cpu in range(number * threads):
            folder = tmp_path / f"cpu{cpu}"
            folder.mkdir()
            (folder / "core_id").write_text(f"{cpu % number}\n")
            (folder / "physical_package_id").write_text(f"{cpu % number * 2 // number}\n")
        monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path / "cpu{}"))
        monkeypatch.setattr(cores, "_quota", lambda: quota)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number * threads)))

    return set_up


def test_cores_are_shared_out_whole(machine: Callable[..., None]) -> None:
    machine(8, 2)
    assert cores.shares(2, None, True) == [frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})]
    assert cores.shares(3, None, True) == [
        frozenset({0, 1, 8, 9}), frozenset({2, 3, 4, 10, 11, 12}), frozenset({5, 6, 7, 13, 14, 15})
    ]  # fmt: skip
    assert cores.shares(8, True, False) == [frozenset({core, core + 8}) for core in range(8)]
    assert cores.num_cores({0, 1, 8, 9}) == 2


def test_cores_are_bound_only_where_it_helps(machine: Callable[..., None]) -> None:
    machine(8, 2)
    assert cores.shares(1, None, True) is None
    assert cores.shares(2, None, False) is None, "ranks on other devices"
    assert cores.shares(5, None, True) is None, "less than two cores each"
    assert cores.shares(2, False, True) is None
    with pytest.raises(ValueError, match="bind_cores: 8 cores are not enough for 9 ranks"):
        cores.shares(9, True, True)


def test_a_quota_says_nothing_of_places(machine: Callable[..., None]) -> None:
    machine(8, 2, quota=4)
    assert cores.shares(2, None, True) is None
    assert cores.shares(2, True, True) is not None


def test_ranks_are_bound(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    available = sorted(os.sched_getaffinity(0))
    if cores.num_cores(available) < 2:
        pytest.skip("one core")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    executor = make_executor(2, options={"bind_cores": True})
    found = executor.collective_rpc(lambda worker: (os.sched_getaffinity(0), int(os.environ["OMP_NUM_THREADS"])))
    assert found[0][0].isdisjoint(found[1][0])
    assert sorted(found[0][0] | found[1][0]) == available
    assert [threads for _, threads in found] == [cores.num_cores(bound) for bound, _ in found]
    assert sorted(os.sched_getaffinity(0)) == available, "this process is not bound"


# -- options -----------------------------------------------------------------------------------------------------------


def test_options() -> None:
    options = Options(chunk_bytes="64KiB", num_chunks=4)  # type: ignore[arg-type]
    assert (options.chunk_bytes, options.num_chunks, options.start_method) == (65536, 4, "fork_server")
    for wrong in ({"chunk_bytes": 100}, {"num_chunks": 0}, {"shutdown_timeout": 0}, {"start_method": "fork"}, {"chunks": 1}):
        with pytest.raises(ValidationError):
            Options(**wrong)  # type: ignore[arg-type]
