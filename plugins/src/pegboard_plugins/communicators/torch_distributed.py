"""Collectives by torch.distributed: gloo on the cpu, NCCL on CUDA devices. Also for ranks on several hosts.

The group has a process group of its own, made without ``init_process_group``: nothing global is set, and engines of one process
do not meet in it.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pegboard.contracts.communicator import Communicator, CommunicatorError, CommunicatorTimeout, PeerLost
from pegboard_plugins.communicators.checks import check_group, check_peer
from pegboard_plugins.communicators.peers import Process
from pegboard_plugins.communicators.rendezvous import Meeting, Pauses, meet
from pegboard_plugins.communicators.sums import check_summable

_TAG = 0
_NETWORK_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of torch: the interface over which gloo talks to other hosts."""
_GRACE_SECONDS = 1.0
"""A connection may be seen to close before the process behind it has ended."""


class TorchDistributedCommunicator(Communicator):
    """On CUDA, NCCL's watchdog enforces the time-out, and operations are queued on the current stream."""

    def __init__(self, *, rank: int, world_size: int, group: str, rendezvous: str, device: torch.device, timeout: float) -> None:
        check_group(rank, world_size, group)
        self.rank, self.world_size = rank, world_size
        self._who, self._alone = f"group {group!r}, rank {rank}", world_size == 1
        self._device, self._timeout = device, timeout
        self.capturable = device.type == "cuda"
        self._refusal: CommunicatorError | None = None
        self._processes: dict[int, Process] = {}
        self._backend: Any = None
        if self._alone:
            return
        if device.type != "cpu" and not (device.type == "cuda" and dist.is_nccl_available()):
            raise ValueError(
                f"communicator 'torch_distributed' has nothing for {device} in this build of torch; it knows cpu and cuda"
            )
        deadline = time.monotonic() + timeout
        try:
            store = self._gather_ranks(meet(rendezvous, group, timeout), deadline)
            one_host = not rendezvous.startswith("tcp://")
            self._backend = self._make_backend(store, None if one_host else rendezvous)
            self.barrier()  # nobody needs rank 0's store any more
        except CommunicatorError:
            raise
        except RuntimeError as error:
            raise self._translate(error, "meeting the other ranks") from error

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place."""
        if self._alone or not tensor.numel():
            return tensor
        check_summable(tensor.dtype)
        whole = tensor.contiguous()
        self._run("all_reduce", "allreduce", [whole])
        return tensor if whole is tensor else tensor.copy_(whole)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self._alone:
            return tensor
        if tensor.dim() == 0:
            tensor = tensor.reshape(1)
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"all_gather along dimension {dim} of a tensor of shape {list(tensor.shape)}")
        parts = tensor.new_empty(self.world_size, *tensor.shape)
        if tensor.numel():
            self._run("all_gather", "_allgather_base", _bytes(parts), _bytes(tensor.contiguous()))
        return torch.cat(parts.unbind(), dim) if dim % tensor.dim() else parts.flatten(0, 1)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        check_peer(to, self.rank, self.world_size, "send")
        if tensor.numel():
            self._run(f"send to rank {to}", "send", [_bytes(tensor.contiguous())], to, _TAG)

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        check_peer(source, self.rank, self.world_size, "recv")
        if not tensor.numel():
            return tensor
        whole = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._run(f"recv from rank {source}", "recv", [_bytes(whole)], source, _TAG)
        return tensor if whole is tensor else tensor.copy_(whole)

    def barrier(self) -> None:
        if self._alone:
            return
        options = dist.BarrierOptions()
        options.device = self._device
        self._run("barrier", "barrier", options)

    def close(self) -> None:
        """Not while an operation is running."""
        if self._refusal is None:
            self._refusal = CommunicatorError(f"{self._who}: closed")
        if self._backend is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # others may need what is still queued
            self._backend.shutdown()
            self._backend = None

    # -- how operations run and fail ---------------------------------------------------------------------------------

    def _run(self, what: str, method: str, *args: Any) -> None:
        """No local variable holds the back end, which closes its connections only when nothing refers to it."""
        if self._refusal is not None:
            raise self._again()
        try:
            getattr(self._backend, method)(*args).wait()
        except BaseException as error:
            self._fail(error, what)

    def _fail(self, error: BaseException, what: str) -> NoReturn:
        """What the others have got is unknown: the group is lost. Its connections close, so that they notice."""
        problem = self._refusal or self._translate(error, what)
        self._refusal = problem
        if self._backend is not None:
            self._backend.abort()
            self._backend = None
        if isinstance(error, RuntimeError):
            raise self._again() from error
        raise error

    def _translate(self, error: BaseException, what: str) -> CommunicatorError:
        """torch tells what went wrong in its message only, and not which rank it was."""
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            lost = self._ended(0.0)
            if not lost:
                return CommunicatorTimeout(f"{self._who}: {what} has waited {self._timeout:g} s for other ranks: {text}")
        elif "onnection" in text or "peer" in text or "socket" in text.lower():
            lost = self._ended(_GRACE_SECONDS)
            if not lost:
                return PeerLost(f"{self._who}: {what} cannot end: a rank has failed or left the group: {text}")
        else:
            return CommunicatorError(f"{self._who}: {what} has failed: {text}")
        names = ", ".join(f"rank {r} (process {self._processes[r].pid}, which has ended)" for r in lost)
        return PeerLost(f"{self._who}: {what} cannot end: {names}")

    def _ended(self, patience: float) -> list[int]:
        """Ranks of this host whose processes have ended, or do so soon."""
        pauses = Pauses(time.monotonic() + patience)
        while True:
            ended = [rank for rank, process in self._processes.items() if process.has_ended()]
            if ended or pauses.over():
                return ended

    def _again(self) -> CommunicatorError:
        assert self._refusal is not None
        return type(self._refusal)(str(self._refusal))

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _gather_ranks(self, meeting: Meeting, deadline: float) -> dist.Store:
        """All ranks' processes are known, and rank 0's record is gone, before any rank goes on."""
        me = Process.current()
        if self.rank:
            record = meeting.find(self._who, deadline)
            store = meeting.open_store(record["store"], max(0.001, deadline - time.monotonic()))
        else:
            store, where = meeting.make_store(self._timeout)
            record = {"process": me, "store": where, "world_size": self.world_size}
        if record["world_size"] != self.world_size:
            raise CommunicatorError(
                f"{self._who}: rank 0 has made a group of {record['world_size']} ranks, this one is of {self.world_size}"
            )
        store.set(f"process{self.rank}", "\n".join(map(str, me)))
        if self.rank:
            self._await_keys(store, ["open"], deadline)
        else:
            meeting.offer(record)
            try:
                self._await_keys(store, [f"process{r}" for r in range(self.world_size)], deadline)
            finally:
                meeting.withdraw()
            store.set("open", "1")
        for rank in range(self.world_size):
            host, pid, started = store.get(f"process{rank}").decode().split("\n")
            self._processes[rank] = Process(host, int(pid), int(started))
        return store

    def _await_keys(self, store: dist.Store, keys: list[str], deadline: float) -> None:
        pauses = Pauses(deadline)
        while missing := [key for key in keys if not store.check([key])]:
            if pauses.over():
                raise CommunicatorTimeout(f"{self._who}: not all ranks have come in time; missing are {', '.join(missing)}")

    def _make_backend(self, store: dist.Store, rendezvous: str | None) -> Any:
        patience = datetime.timedelta(seconds=self._timeout)
        if self._device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()
            options._timeout, options._devices = patience, [_gloo_device(rendezvous)]
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = patience
        return dist.ProcessGroupNCCL(store, self.rank, self.world_size, nccl)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor: back ends know few dtypes, but all know uint8. (One of a single element may have any stride.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _gloo_device(rendezvous: str | None) -> Any:
    """Where gloo listens: on this host only, or at the address from which the rendezvous is reached. A host's own name, which
    gloo would look up, often stands for an address that other hosts cannot reach."""
    create = dist.ProcessGroupGloo.create_device
    if rendezvous is None:
        return create(hostname="127.0.0.1")
    if interface := os.environ.get(_NETWORK_INTERFACE):
        return create(interface=interface)
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return create(hostname=probe.getsockname()[0])
