"""Where this process stands among those that a launcher has started: read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from pegboard.engine.errors import EngineStartError

OPTION: Final = "plugins.standard.launch_address"


class Names(NamedTuple):
    """A launcher's variables."""

    rank: str
    size: str
    local_rank: str


FAMILIES: Final = (
    Names("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, and whoever sets them by hand
    Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)
"""The first that is there counts: torchrun may itself have been started by srun."""
_HINT: Final = "start one process per rank, for example: torchrun --nproc-per-node {size} script.py"


class Place(NamedTuple):
    """``local_rank``: None where the launcher does not say. ``address``: host:port at which all meet; "" for one rank.
    ``is_served``: the launcher serves a store there. ``run``: tells this start of the processes from earlier ones."""

    rank: int
    size: int
    local_rank: int | None
    address: str
    is_served: bool
    run: str


def read_place(ranks: int, sizes: str, address: str | None, env: Mapping[str, str] = os.environ) -> Place:
    """``ranks`` are configured (by ``sizes``, in words); ``address`` as well, or None for that in the environment.

    Raises ``EngineStartError`` naming the variable, its value and what to do.
    """
    names = next((n for n in FAMILIES if n.rank in env or n.size in env), None)
    if names is None:
        known = " nor ".join(f"{n.rank} and {n.size}" for n in FAMILIES)
        raise EngineStartError(
            f"executor 'external_launcher': neither {known} are set, so no launcher has started this process; "
            f"{_HINT.format(size=ranks)}; without a launcher choose another executor (executor.name)"
        )
    size = _integer(names.size, env, 1, None, f"the number of processes, {ranks} here")
    if size != ranks:
        raise EngineStartError(
            f"{names.size}={size}, but the configuration asks for {ranks} rank{'s' * (ranks != 1)} ({sizes}); "
            f"{_HINT.format(size=ranks)}; or change these sizes"
        )
    rank = _integer(names.rank, env, 0, size - 1, f"this process's number, from 0 to {size - 1}")
    local = None
    if names.local_rank in env:
        local = _integer(names.local_rank, env, 0, size - 1, "this process's number on its host, or leave it out")
    is_served = address is None and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run = f"{env.get('TORCHELASTIC_RUN_ID', '')}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}.{size}"
    where = "" if size == 1 else _checked(address) if address is not None else _master(env)
    return Place(rank, size, local, where, is_served, run)


def _master(env: Mapping[str, str]) -> str:
    host = env.get("MASTER_ADDR", "").strip()
    if not host:
        raise EngineStartError(
            f"MASTER_ADDR is {'empty' if 'MASTER_ADDR' in env else 'not set'}; set it to the name or address of rank 0's host, "
            f"the same for all ranks, or give {OPTION}='host:port'"
        )
    port = _integer("MASTER_PORT", env, 1, 65535, f"a free port of {host}, the same for all ranks, or give {OPTION}='host:port'")
    return f"{host}:{port}"


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise EngineStartError(f"{OPTION}={address!r} must be 'host:port' of rank 0's host, with a port from 1 to 65535")
    return address


def _integer(name: str, env: Mapping[str, str], least: int, most: int | None, meaning: str) -> int:
    text = env.get(name)
    if text is None:
        raise EngineStartError(f"{name} is not set; set it to {meaning}")
    try:
        value = int(text)
    except ValueError:
        raise EngineStartError(f"{name}={text!r} is no integer; set it to {meaning}") from None
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise EngineStartError(f"{name}={value} must be {limits}; set it to {meaning}")
    return value
