"""Which bundles of a placement group the ranks get. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pegboard.engine.errors import EngineStartError

Resources = Mapping[str, float]

_RAYS_OWN: Final = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle")
_EPSILON: Final = 1e-6
"""Ray counts in parts of 10 000."""


@dataclass(frozen=True)
class Bundle:
    index: int
    resources: Resources
    held: Resources = field(default_factory=dict)
    """What the engine's process itself has of them."""
    node: str = ""
    address: str = ""

    def room(self, need: Resources) -> int:
        """How many ranks fit in."""
        free = [(self.resources.get(name, 0) - self.held.get(name, 0) + _EPSILON) / amount for name, amount in need.items()]
        return max(0, int(min(free)))

    def __str__(self) -> str:
        held = f" less {text(self.held)} of this process" if any(self.held.values()) else ""
        return f"{self.index}: {text(self.resources)}{held}"


def choose(bundles: Sequence[Bundle], need: Resources, ranks: int, driver_node: str) -> list[Bundle]:
    """The bundle of each rank, in rank order: on the driver's node first, then node by node; all on one node where one has room.
    Raises ``EngineStartError`` where there is not enough."""
    places: dict[str, list[Bundle]] = {}
    for bundle in sorted(bundles, key=lambda b: (b.node != driver_node, b.address, b.node, b.index)):
        places.setdefault(bundle.node, []).extend([bundle] * bundle.room(need))
    alone = next((found for found in places.values() if len(found) >= ranks), None)
    every = alone or [bundle for found in places.values() for bundle in found]
    if len(every) < ranks:
        raise EngineStartError(
            f"the placement group that this process runs in has room for {len(every)} of {ranks} ranks, each of which reserves "
            f"{text(need)}; its bundles: {'; '.join(map(str, bundles))}. Give it more, or lower plugins.executor_ray.num_cpus, "
            "num_gpus or resources"
        )
    return every[:ranks]


def near_ranks(rooms: Mapping[str, int], driver_node: str, ranks: int, strategy: str) -> int:
    """How many ranks of a group that is to be made belong on the driver's node. ``rooms``: how many each node has room for.

    All of them, if it has room; else, packed, as many as it has room for, unless another node has room for all.
    """
    room = min(rooms.get(driver_node, 0), ranks)
    if "SPREAD" in strategy:
        return min(room, 1)
    if room < ranks and (strategy == "STRICT_PACK" or max(rooms.values(), default=0) >= ranks):
        return 0
    return room


def check_named(bundles: Sequence[Bundle], indices: Sequence[int], need: Resources, ranks: int) -> list[Bundle]:
    """The bundles that a user has named, one per rank. Raises ``EngineStartError``."""
    known = {bundle.index: bundle for bundle in bundles}
    problem = ""
    if len(indices) != ranks:
        problem = f"there are {ranks} ranks, and each needs one"
    elif unknown := [index for index in indices if index not in known]:
        problem = f"there is no bundle {', '.join(map(str, unknown))}, only 0 to {max(known)}"
    elif len(set(indices)) < len(indices):
        problem = "no bundle may be named twice"
    elif small := [known[index] for index in indices if not known[index].room(need)]:
        problem = f"a rank reserves {text(need)}, which is not in bundle {'; '.join(map(str, small))}"
    if problem:
        raise EngineStartError(f"plugins.executor_ray.bundle_indices={list(indices)}: {problem}")
    return [known[index] for index in indices]


def text(resources: Resources) -> str:
    """Without what Ray counts for itself."""
    shown = sorted(
        (name, amount) for name, amount in resources.items() if not name.startswith(_RAYS_OWN) and "_group_" not in name
    )
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in shown) + "}"
