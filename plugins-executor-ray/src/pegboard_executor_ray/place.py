"""Where a process runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pegboard.engine.errors import EngineStartError


@dataclass(frozen=True)
class Place:
    """Of one rank, or of the engine's process. Plain data."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    devices: tuple[str, ...] = ()
    """Ids of the GPUs that Ray has given to this rank, as they stand in CUDA_VISIBLE_DEVICES."""
    network: str = ""
    """Equal for processes that share a network stack, and so the meaning of an address."""

    @classmethod
    def here(cls, *, rank: bool) -> Place:
        """Of this process, which is connected to Ray; ``rank``: it is an actor that Ray may have given devices."""
        import ray

        context = ray.get_runtime_context()
        return cls(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            devices=tuple(map(str, context.get_accelerator_ids().get("GPU", ()))) if rank else (),
            network=_network(),
        )

    @property
    def node(self) -> str:
        """For people."""
        return f"node {self.node_ip} ({self.hostname}, {self.node_id[:8]})"


def _network() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def check_addresses(places: Sequence[Place]) -> None:
    """Raise ``EngineStartError`` where two hosts give one address: neither could be reached from everywhere."""
    seen: dict[str, Place] = {}
    for place in places:
        other = seen.setdefault(place.node_ip, place)
        if other.network != place.network:
            raise EngineStartError(
                f"{other.node} and {place.node} are different hosts and give the same address; start Ray on each with an address "
                "by which the others reach it (ray start --node-ip-address)"
            )


def visible_devices(places: Sequence[Place], node: str) -> tuple[str, ...]:
    """The devices of the ranks on ``node``, by local rank. Raises ``EngineStartError`` where ranks share one: collectives among
    ranks need a device for each."""
    ranks = [rank for rank, place in enumerate(places) if place.node_id == node]
    devices = [device for rank in ranks for device in places[rank].devices]
    if len(ranks) > 1 and len(set(devices)) < len(devices):
        raise EngineStartError(
            f"ranks {', '.join(map(str, ranks))} on {places[ranks[0]].node} share devices ({', '.join(devices)}); a rank needs "
            "one of its own: set plugins.executor_ray.num_gpus to 1"
        )
    return tuple(devices)
