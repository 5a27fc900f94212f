"""What the conformance tests of communicators let ranks do. Every function runs in a process of its own, as one rank."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pegboard.contracts.communicator import Communicator, CommunicatorError
from pegboard.plugins.provider import accepted_arguments, import_target

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
SHAPES = ((), (1,), (0,), (0, 576), (1, 576), (3, 5, 7), (32, 576))
_DRAW = {"float32": 4, "bfloat16": 3, "int64": 1}


@dataclass(frozen=True)
class Member:
    """One rank of one group, and how to make its communicator: an import path, and options of its constructor."""

    target: str
    rank: int
    world_size: int
    rendezvous: str
    group: str = "tp0"
    timeout: float = 60.0
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Communicator:
        torch.set_num_threads(1)
        offered = {
            "rank": self.rank,
            "world_size": self.world_size,
            "group": self.group,
            "rendezvous": self.rendezvous,
            "device": torch.device(self.device),
            "timeout": self.timeout,
            **self.options,
        }
        target = import_target(self.target)
        made = target(**accepted_arguments(target, offered))
        assert isinstance(made, Communicator)
        return made


def use(member: Member, job: Callable[..., Any], *args: Any) -> Any:
    """``job(communicator, device, *args)``, and close."""
    comm = member.make()
    try:
        with torch.inference_mode():
            return job(comm, torch.device(member.device), *args)
    finally:
        comm.close()


def part(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` contributes; every rank can compute every other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**40), 2**40, shape, generator=generator).to(dtype)


def check_sum(found: torch.Tensor, parts: list[torch.Tensor], what: object) -> None:
    exact = torch.stack([p.double() if p.is_floating_point() else p.long() for p in parts]).sum(0)
    assert found.shape == parts[0].shape, what
    assert found.dtype == parts[0].dtype, what
    if not found.is_floating_point():
        assert torch.equal(found.cpu(), exact.to(found.dtype)), what
        return
    scale = torch.stack([p.double().abs() for p in parts]).sum(0)
    bound = len(parts) * torch.finfo(found.dtype).eps * scale + 1e-30
    assert bool(((found.cpu().double() - exact).abs() <= bound).all()), what


def digest(tensor: torch.Tensor) -> str:
    plain = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return hashlib.sha1(plain.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies, contiguous and not. (A single element counts as contiguous with any stride.)"""
    found = {"contiguous": tensor.clone()}
    if tensor.dim() > 0:
        found["transposed"] = tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
        wide[..., ::2] = tensor
        found["every second"] = wide[..., ::2]
    return found


# -- jobs: what they return is compared between ranks --------------------------------------------------------------------


def all_reduce(comm: Communicator, device: torch.device, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[str]:
    seen = []
    for shape in shapes:
        for dtype in dtypes:
            parts = [part(1, rank, shape, dtype) for rank in range(comm.world_size)]
            for layout, tensor in _layouts(parts[comm.rank].to(device)).items():
                found = comm.all_reduce(tensor)
                check_sum(found, parts, (shape, dtype, layout))
                seen.append(digest(found))
    return seen


def all_gather(comm: Communicator, device: torch.device, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    for shape in shapes:
        for dtype in dtypes:
            parts = [part(2, rank, shape, dtype) for rank in range(comm.world_size)]
            for dim in {-1, 0, len(shape) // 2} if shape else {-1, 0}:
                wanted = torch.cat([p.reshape(1) if not shape else p for p in parts], dim)
                for layout, tensor in _layouts(parts[comm.rank].to(device)).items():
                    found = comm.all_gather(tensor, dim)
                    if comm.world_size > 1 or shape:
                        assert found.shape == wanted.shape, (shape, dtype, dim, layout)
                    assert torch.equal(found.cpu().reshape(wanted.shape), wanted), (shape, dtype, dim, layout)
                    assert found.dtype == dtype


def messages(comm: Communicator, device: torch.device, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    """Around the ring, rank 0 first; each rank changes what it has sent at once."""
    following, previous = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for seed, shape in enumerate(shapes):
        for dtype in dtypes:
            own, wanted = part(seed, comm.rank, shape, dtype), part(seed, previous, shape, dtype)
            for (layout, tensor), into in zip(
                _layouts(own.to(device)).items(), _layouts(torch.zeros_like(wanted, device=device)).values(), strict=True
            ):
                if comm.rank == 0:
                    comm.send(tensor, following)
                    tensor.zero_()
                assert comm.recv(into, previous) is into
                assert torch.equal(into.cpu(), wanted), (shape, dtype, layout)
                if comm.rank:
                    comm.send(tensor, following)
                    tensor.zero_()


def random_operations(comm: Communicator, device: torch.device, seed: int, count: int) -> str:
    """Whatever comes, with pauses that are each rank's own. Returns a digest of all sums."""
    common, own, seen = random.Random(seed), random.Random(f"{seed} {comm.rank}"), hashlib.sha1()
    names, weights = zip(*_DRAW.items(), strict=True)
    for number in range(count):
        operation = common.choice(["all_reduce"] * 3 + ["all_gather"] * 2 + ["message"] * 2 + ["barrier"])
        shape = (common.choice([1, 2, 7, 32]), common.choice([1, 9, 576]))
        dtype, source = getattr(torch, common.choices(names, weights)[0]), common.randrange(comm.world_size)
        to = (source + common.randrange(1, max(2, comm.world_size))) % comm.world_size
        if own.random() < 0.05:
            time.sleep(0.002 * own.random())
        parts = [part(seed + number, rank, shape, dtype) for rank in range(comm.world_size)]
        if operation == "barrier":
            comm.barrier()
        elif operation == "all_reduce":
            found = comm.all_reduce(parts[comm.rank].clone().to(device))
            check_sum(found, parts, (number, shape, dtype))
            seen.update(digest(found).encode())
        elif operation == "all_gather":
            wanted = torch.cat(parts, number % 2)
            assert torch.equal(comm.all_gather(parts[comm.rank].to(device), number % 2).cpu(), wanted), (number, shape, dtype)
        elif source != to and comm.rank == source:
            comm.send(parts[source].to(device), to)
        elif source != to and comm.rank == to:
            found = comm.recv(torch.zeros_like(parts[source], device=device), source)
            assert torch.equal(found.cpu(), parts[source]), (number, shape, dtype)
    return seen.hexdigest()


def two_groups(tp: Member, pp: Member) -> list[str]:
    """Stages of a pipeline with two ranks each: sums within a stage, messages between them, and both in no fixed relation."""
    stage, seen = pp.rank, []
    tensor_group, pipeline = tp.make(), pp.make()
    for number in range(50):
        found = tensor_group.all_reduce(part(number, tp.rank, (4, 9), torch.float32))
        if stage == 0:
            pipeline.send(found, 1)
        else:
            pipeline.recv(found, 0)
        check_sum(found, [part(number, rank, (4, 9), torch.float32) for rank in range(2)], number)
        seen.append(digest(found))
    pipeline.barrier()
    for comm in (tensor_group, pipeline):
        comm.close()
    return seen


def made_again(member: Member, count: int) -> tuple[list[int], list[int]]:
    """The same group again and again; each rank leaves as soon as it has its result. Open files and threads, first and last."""

    def open_things() -> list[int]:
        gc.collect()
        return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]

    first: list[int] = []
    for number in range(count):
        comm = member.make()
        parts = [part(number, rank, (2, 9), torch.float32) for rank in range(member.world_size)]
        check_sum(comm.all_reduce(parts[member.rank].clone().to(member.device)), parts, number)
        comm.close()
        comm.close()
        del comm
        first = first or open_things()
    return first, open_things()


# -- jobs in which something goes wrong ----------------------------------------------------------------------------------

Failure = tuple[list[str], str, float]
"""Names of the error's classes, its message, and after how many seconds it came."""


def failure(operation: Callable[[], Any]) -> Failure:
    began = time.monotonic()
    try:
        operation()
    except CommunicatorError as error:
        return [c.__name__ for c in type(error).__mro__], str(error), time.monotonic() - began
    raise AssertionError("there was no error")


def make_alone(member: Member) -> Failure:
    return failure(member.make)


def survive(member: Member, victim: int) -> list[Failure]:
    """``victim`` kills itself while the others wait for it, in a group for each operation; twice per group."""
    big = torch.zeros(4_000_000)
    operations: dict[str, Callable[[Communicator], Any]] = {
        "all_reduce": lambda comm: comm.all_reduce(torch.zeros(9, device=member.device)),
        "all_gather": lambda comm: comm.all_gather(torch.zeros(9, device=member.device)),
        "barrier": lambda comm: comm.barrier(),
        "recv": lambda comm: comm.recv(torch.zeros(9, device=member.device), victim),
        "send": lambda comm: [comm.send(big.to(member.device), victim) for _ in range(4)],
    }
    comms = {name: replace(member, group=name).make() for name in operations}
    comms["barrier"].barrier()
    if member.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for name, operation in operations.items():
        found.append(failure(lambda operation=operation, name=name: operation(comms[name])))  # type: ignore[misc]
        found.append(failure(lambda name=name: comms[name].barrier()))  # type: ignore[misc]
        comms[name].close()
    return found


def endless(comm: Communicator, device: torch.device, victim: int, seconds: float) -> Failure:
    """Sums without end; ``victim`` is killed in the middle of one."""
    if comm.rank == victim:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def loop() -> None:
        while True:
            comm.all_reduce(torch.zeros(32, 576, device=device))

    return failure(loop)


def late(comm: Communicator, device: torch.device, folder: str) -> list[Failure]:
    """The last rank comes when the others have given up, and may find all that it needs. Then everybody tries again."""
    comm.barrier()
    found, last = [], comm.world_size - 1
    if comm.rank < last:
        found = [failure(lambda: comm.all_reduce(torch.zeros(9, device=device)))]
        (Path(folder) / f"given-up-{comm.rank}").touch()
    else:
        while len(list(Path(folder).glob("given-up-*"))) < last:
            time.sleep(0.02)
        with contextlib.suppress(CommunicatorError):
            comm.all_reduce(torch.zeros(9, device=device))
    return [*found, failure(comm.barrier)]


def leave(comm: Communicator, device: torch.device) -> Failure | None:
    """The last rank leaves while the others wait for it."""
    comm.barrier()
    if comm.rank < comm.world_size - 1:
        return failure(comm.barrier)
    time.sleep(0.3)
    comm.close()
    return None
