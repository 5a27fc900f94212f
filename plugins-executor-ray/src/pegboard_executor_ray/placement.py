"""Where ranks go: bundles of a placement group, which is the one that this process runs in, or is made for them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
import ray._private.state as _state
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pegboard.engine.errors import EngineStartError
from pegboard_executor_ray.bundles import Bundle, Resources, check_named, choose, near_ranks, text
from pegboard_executor_ray.janitor import Janitor
from pegboard_executor_ray.options import Options

log = logging.getLogger(__name__)

TELL_SECONDS: Final = 3.0
"""Between lines that say what is waited for."""
PREFER_SECONDS: Final = 1.0
"""For room on the driver's node."""
_LOOK_SECONDS: Final = 0.5
_NODE_LABEL: Final = "ray.io/node-id"
"""Ray's own label of each node."""
_REMOVE: Final = """
import signal, sys, ray
signal.alarm(60)  # the cluster may have ended meanwhile
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(sys.argv[2]))))
"""


class Placement:
    """``bundles``: of each rank, in rank order. Ranks on one node are neighbours, those on the driver's node come first, unless
    ``bundle_indices`` says otherwise. ``owned``: the group was made for the ranks, and goes with ``remove``."""

    def __init__(self, options: Options, need: Resources, ranks: int, driver_node: str, name: str) -> None:
        """Waits for what the ranks reserve. Raises ``EngineStartError`` when that does not come in time, and at once where a
        group that is there already has too little. ``name``: of a group that is made."""
        self.need = dict(need)
        self._janitor: Janitor | None = None
        current = get_current_placement_group()
        self.owned = current is None
        if current is None:
            if options.bundle_indices is not None:
                raise EngineStartError(
                    "plugins.executor_ray.bundle_indices names bundles of the placement group that this process runs in, and it "
                    "runs in none"
                )
            self.group = _made(options, self.need, ranks, driver_node, name)
        else:
            self.group = current
        try:
            if self.owned:
                self._janitor = _janitor(self.group)
            _wait(self.group, options, need, ranks)
            found = _bundles(self.group)
            if options.bundle_indices is not None:
                self.bundles: Sequence[Bundle] = check_named(found, options.bundle_indices, need, ranks)
            else:
                self.bundles = choose(found, need, ranks, driver_node)
        except BaseException:
            self.remove()
            raise

    def options_of(self, rank: int) -> dict[str, Any]:
        """For the actor of one rank."""
        return {
            "num_cpus": self.need.get("CPU", 0),
            "num_gpus": self.need.get("GPU", 0),
            "resources": {name: amount for name, amount in self.need.items() if name not in ("CPU", "GPU")} or None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundles[rank].index
            ),
        }

    def remove(self) -> None:
        """Ends the actors in it too. Idempotent; leaves a group alone that was there before."""
        owned, self.owned = self.owned, False
        if owned:
            ray.util.remove_placement_group(self.group)
        if self._janitor is not None:
            self._janitor.send_home()


def _made(options: Options, need: dict[str, float], ranks: int, driver_node: str, name: str) -> PlacementGroup:
    """A group that may have to be waited for. Ray does not prefer the driver's node by itself.

    What is available is known with a delay of about a second: so first as if everything were, which Ray then knows better.
    """

    def make(labels: list[dict[str, str]] | None) -> PlacementGroup:
        bundles = [need] * ranks
        group: PlacementGroup = ray.util.placement_group(
            bundles, strategy=options.strategy, name=name, bundle_label_selector=labels
        )
        return group

    tried = {0}
    for resources in (_state.total_resources_per_node, _state.available_resources_per_node):
        rooms = {node: Bundle(0, has).room(need) for node, has in resources().items()}  # type: ignore[no-untyped-call]
        near = near_ranks(rooms, driver_node, ranks, options.strategy)
        if near not in tried:
            tried.add(near)
            group, found = make([{_NODE_LABEL: driver_node}] * near + [{}] * (ranks - near)), False
            try:
                if found := group.wait(PREFER_SECONDS):
                    return group
            finally:
                if not found:
                    ray.util.remove_placement_group(group)
    return make(None)


def _janitor(group: PlacementGroup) -> Janitor | None:
    """Ray removes a group when the job ends that has made it. In a task or an actor that may be long after this process."""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return Janitor(sys.executable, "-c", _REMOVE, context.gcs_address, group.id.hex(), environment=environment)


def _wait(group: PlacementGroup, options: Options, need: Resources, ranks: int) -> None:
    limit = options.placement_timeout
    start = told = time.monotonic()
    while not group.wait(min(_LOOK_SECONDS, limit)):
        now = time.monotonic()
        strategy = "" if options.strategy == "PACK" else f" placed by {options.strategy}"
        nodes = sum(node["Alive"] for node in ray.nodes())
        state = (
            f"{ranks} x {text(need)}{strategy} wanted, {text(ray.available_resources())} available, of "
            f"{text(ray.cluster_resources())} on {nodes} node{'s' * (nodes != 1)}"
        )
        if now - start >= limit:
            raise EngineStartError(
                f"the Ray cluster did not have what the ranks reserve within plugins.executor_ray.placement_timeout={limit:g} s: "
                f"{state}"
            )
        if now - told >= TELL_SECONDS:
            told = now
            log.warning("waiting for the Ray cluster, %.0f of %g s: %s", now - start, limit, state)


def _bundles(group: PlacementGroup) -> list[Bundle]:
    table = placement_group_table(group)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    mine = _held(group)
    return [
        Bundle(index, dict(resources), mine.get(index, {}), node, addresses.get(node, ""))
        for index, resources in sorted(table["bundles"].items())
        for node in [table["bundles_to_node_id"][index]]
    ]


def _held(group: PlacementGroup) -> Mapping[int, dict[str, float]]:
    """What this process itself holds of the group's bundles, which Ray tells, by bundle, in no public way."""
    found: dict[int, dict[str, float]] = {}
    for key, parts in ray.get_runtime_context().worker.core_worker.resource_ids().items():
        name, _, rest = key.rpartition("_group_")
        index, _, owner = rest.partition("_")
        if owner == group.id.hex() and name != "bundle":
            found.setdefault(int(index), {})[name] = sum(amount for _, amount in parts)
    return found
