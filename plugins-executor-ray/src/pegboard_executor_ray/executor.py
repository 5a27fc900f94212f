"""RayExecutor: one actor per rank on a Ray cluster, calls through a compiled graph."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from pegboard_executor_mp.calls import Call, Calls, Deadline
from pegboard_executor_mp.failure import Failure
from pegboard_executor_mp.fleet_executor import FleetExecutor
from pegboard_executor_ray.dag_fleet import DagFleet
from pegboard_executor_ray.options import Options

log = logging.getLogger(__name__)


class RayExecutor(FleetExecutor):
    """A call is answered after those that were made before it, by whatever ranks. Across nodes there is one call at a time."""

    uses_ray: ClassVar[bool] = True
    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True
    section: ClassVar[str] = "executor_ray"
    _fleet: DagFleet

    def _init_executor(self) -> None:
        options = self.composition.options("executor_ray") or Options()
        self._calls, self._failure = Calls(), Failure()
        fleet = DagFleet(options, self.world, self.config.executor.step_timeout, self._calls, self._failure)

        def start(deadline: Deadline) -> None:
            fleet.start(self.composition, deadline)
            self.collective_rpc(_nothing, timeout=deadline.left())
            if self.world.pp_size > 1 and not fleet.one_node:
                log.warning("on several nodes, stages take turns with executor 'ray'; with 'ray-mq' they all work at once")

        self._start(fleet, start, options.start_timeout)

    def _waits_for(self, call: Call) -> str:
        return self._fleet.waits_for(call)


def _nothing(worker: Any) -> None:
    """The first call through a graph takes longer."""
