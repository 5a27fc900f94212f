"""RayQueueExecutor: one actor per rank on a Ray cluster, calls over the message queue."""

from __future__ import annotations

from typing import ClassVar

from pegboard_executor_mp.calls import Calls, Deadline
from pegboard_executor_mp.failure import Failure
from pegboard_executor_mp.fleet_executor import FleetExecutor
from pegboard_executor_ray.options import Options
from pegboard_executor_ray.queue_fleet import QueueFleet


class RayQueueExecutor(FleetExecutor):
    """Ray places the ranks and watches them; once they are there, no call of the engine passes through it."""

    uses_ray: ClassVar[bool] = True
    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True
    section: ClassVar[str] = "executor_ray"
    _fleet: QueueFleet

    def _init_executor(self) -> None:
        options = self.composition.options("executor_ray") or Options()
        self._calls, self._failure = Calls(), Failure()
        fleet = QueueFleet(options, self.world, self.config.executor.step_timeout, self._calls, self._failure)

        def start(deadline: Deadline) -> None:
            fleet.start(self.composition, deadline)

        self._start(fleet, start, options.start_timeout)
