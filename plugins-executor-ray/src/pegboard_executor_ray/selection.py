"""What ``executor.name = "auto"`` means where Ray is installed. Imports Ray only if this process has."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from pegboard.plugins import Chosen, ExecutorProvider

if TYPE_CHECKING:
    from pegboard.config import EngineConfig

PREFERRED: Final = ("ray-mq", "ray")
"""The queue carries steps at the pace of the multi-process executor; the graph is for whoever names it."""
_GPUS: Final = "/dev/nvidia[0-9]*"


def choose(config: EngineConfig, candidates: Mapping[str, ExecutorProvider]) -> Chosen | None:
    """One of ``PREFERRED`` in a placement group with room for the ranks, and where they do not fit on this host; None otherwise,
    so that they stay on it. Several ranks in a placement group never stay: what its other processes have would be taken."""
    sizes = {"tp": config.executor.tensor_parallel_size, "pp": config.executor.pipeline_parallel_size}
    needed = {capability for capability, size in sizes.items() if size > 1}
    name = next((n for n in PREFERRED if n in candidates and candidates[n].capabilities >= needed), None)
    if name is None or find_spec("ray") is None:
        return None
    ranks = sizes["tp"] * sizes["pp"]
    reason = _in_placement_group(config, ranks) or _too_large(config, ranks)
    return Chosen(name, reason) if reason else None


def _in_placement_group(config: EngineConfig, ranks: int) -> str:
    if not _connected():
        return ""
    from ray.util.placement_group import get_current_placement_group

    group = get_current_placement_group()
    if group is None:
        return ""
    if ranks > 1:
        return f"this process runs in a Ray placement group, which is to hold the {ranks} ranks"
    others = len(group.bundle_specs) - 1
    return f"this process runs in a Ray placement group with {others} more bundle{'s' * (others > 1)}" if others else ""


def _too_large(config: EngineConfig, ranks: int) -> str:
    gpus = 0 if config.device == "cpu" else visible_gpus()
    if gpus or (config.device == "cuda" and _has_cluster(config)):
        needed = f"{ranks} ranks need as many GPUs" if ranks > 1 else "a rank needs a GPU"
        return f"{needed}, and this host has {gpus or 'none'}" if ranks > gpus else ""
    cores = len(os.sched_getaffinity(0))
    if ranks <= cores or not _connected():
        return ""
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"{ranks} ranks are more than the {cores} cores of this host, and {nodes} Ray nodes are connected" if nodes > 1 else ""


def _has_cluster(config: EngineConfig) -> bool:
    """Or so the user says."""
    stated = config.plugins.sections.get("executor_ray", {}).get("address") or os.environ.get("RAY_ADDRESS")
    return _connected() or stated not in (None, "", "local")


def visible_gpus() -> int:
    """NVIDIA devices of this host that this process may see, found without torch."""
    there = len(glob.glob(_GPUS))
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if stated is None else min(there, len([entry for entry in stated.split(",") if entry.strip() not in ("", "-1")]))


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
