"""Starts an engine's processes: makes what they meet by, says what they need, and runs the supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import cloudpickle

from pegboard.engine.errors import EngineStartError
from pegboard.plugins import Composition, PluginError
from pegboard.wire import World
from pegboard_executor_mp import cores, process
from pegboard_executor_mp.options import Options
from pegboard_executor_mp.queue import Handle, segment
from pegboard_executor_mp.start_plan import Boot, StartPlan, environment, memory_file

SETTINGS: Final = "plugins.executor_mp.chunk_bytes or plugins.executor_mp.num_chunks"
_PER_CHUNK: Final = 128
_PER_QUEUE: Final = 16 << 10
"""Bytes that a queue needs at most beside the contents of its chunks."""


def check_shared_memory(chunk_bytes: int, num_chunks: int, ranks: int, settings: str = SETTINGS) -> None:
    """Raise ``EngineStartError`` unless all queues of ``ranks`` ranks fit: one error now instead of one from some rank later."""
    queues = ranks + 1
    needed = queues * (num_chunks * (chunk_bytes + _PER_CHUNK) + _PER_QUEUE)
    segment.remove_orphans()
    free = segment.free_bytes()
    if needed > free:
        raise EngineStartError(
            f"{queues} message queues ({ranks} rank{'s' * (ranks > 1)}, and one to all) with {num_chunks} chunks of "
            f"{chunk_bytes} bytes need {needed} bytes of shared memory, and {segment.DIRECTORY} has {free} bytes free; "
            f"lower {settings}, or enlarge {segment.DIRECTORY} (for a container: --shm-size)"
        )


def check_portable(composition: Composition) -> None:
    """Raise ``PluginError`` for parts that no other process can find."""
    for kind, provider in composition.parts.items():
        if isinstance(provider.target, str) and provider.target.startswith("__main__:") and not provider.plugin:
            raise PluginError(
                f"{kind} {provider.name!r} is defined in the script that runs, which the ranks' processes do not have; move it "
                "into a module of its own, or into a plugin with an entry point in the group 'pegboard'"
            )


class Launch:
    """A supervisor that was started. ``hello``: rank to the read end from which its ``start_plan.Hello`` comes, or nothing."""

    def __init__(self, supervisor: subprocess.Popen[bytes], control: socket.socket, hello: dict[int, int]) -> None:
        self.supervisor, self.control, self.hello = supervisor, control, hello

    def close(self) -> None:
        self.control.close()
        while self.hello:
            os.close(self.hello.popitem()[1])


def launch(
    composition: Composition, options: Options, world: World, rendezvous: str, handles: list[Handle], queue: str
) -> Launch:
    """``queue``: the segment of the queue of requests, ``handles`` those of its readers.

    Raises ``PluginError`` for plugins that cannot be sent, ``EngineStartError`` where no interpreter can be started.
    """
    if not sys.executable:
        raise EngineStartError("sys.executable is empty, this Python is embedded; set it to an interpreter with its packages")
    boot = Boot(
        composition=cloudpickle.dumps(composition),
        worlds=[_world_of(world, rank, rendezvous) for rank in range(world.size)],
        handles=handles,
        log_levels=process.log_levels(),
        chunk_bytes=options.chunk_bytes,
        num_chunks=options.num_chunks,
    )
    process.open_standard_descriptors()
    platform = composition.parts.get("platform")
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(control)
        theirs.enter_context(far_end)
        pipes = []
        for _ in range(world.size):
            pipes.append(os.pipe2(os.O_CLOEXEC))
            ours.callback(os.close, pipes[-1][0])
            theirs.callback(os.close, pipes[-1][1])
        boot_file = theirs.enter_context(_memory_file(boot))
        plan = StartPlan(
            parent=os.getpid(),
            sys_path=tuple(entry for entry in sys.path if isinstance(entry, str)),  # what is none, Python's import ignores too
            pythonpath=os.environ.get("PYTHONPATH"),
            preload=options.preload,
            spawn=options.start_method == "spawn",
            hello=tuple(write_end for _, write_end in pipes),
            boot=boot_file,
            cores=cores.shares(world.size, options.bind_cores, platform is not None and platform.name == "cpu"),
            rendezvous=rendezvous,
            segment=queue,
            grace=options.shutdown_timeout,
        )
        plan_file = theirs.enter_context(_memory_file(plan))
        supervisor = _start(far_end.fileno(), plan_file, plan)
        ours.pop_all()
    return Launch(supervisor, control, {rank: read_end for rank, (read_end, _) in enumerate(pipes)})


def _world_of(world: World, rank: int, rendezvous: str) -> World:
    return World(rank=rank, local_rank=rank, tp_size=world.tp_size, pp_size=world.pp_size, rendezvous=rendezvous)


@contextlib.contextmanager
def _memory_file(content: object) -> Iterator[int]:
    fd = memory_file(content)
    try:
        yield fd
    finally:
        os.close(fd)


def _start(control: int, plan_file: int, plan: StartPlan) -> subprocess.Popen[bytes]:
    """In a session of its own: signals to this process's group or from its terminal are for this process, which ends the others.
    No standard input: that may be the script that runs here. The script itself is not imported by anybody."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-P", "-m", "pegboard_executor_mp.supervisor", str(control), str(plan_file)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(control, plan_file, plan.boot, *plan.hello),
            env=environment(plan.sys_path),
            start_new_session=True,
        )
    except OSError as error:
        raise EngineStartError(f"{sys.executable} cannot be started: {error}") from error
