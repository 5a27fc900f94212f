"""MultiprocExecutor: one process per rank on this host."""

from __future__ import annotations

from typing import ClassVar

from pegboard_executor_mp import launch
from pegboard_executor_mp.calls import Calls, Deadline
from pegboard_executor_mp.failure import Failure
from pegboard_executor_mp.fleet import Fleet
from pegboard_executor_mp.fleet_executor import FleetExecutor
from pegboard_executor_mp.options import Options


class MultiprocExecutor(FleetExecutor):
    """Calls run on the main thread of each rank's process. None of these imports the script that runs the engine, whose process
    imports no part that ranks alone need."""

    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True
    section: ClassVar[str] = "executor_mp"
    _fleet: Fleet

    def _init_executor(self) -> None:
        options = self.composition.options("executor_mp") or Options()
        launch.check_portable(self.composition)
        launch.check_shared_memory(options.chunk_bytes, options.num_chunks, self.world.size)
        self._calls, self._failure = Calls(), Failure()
        fleet = Fleet(options, self.world, self.config.executor.step_timeout, self._calls, self._failure)

        def start(deadline: Deadline) -> None:
            fleet.start(self.composition)
            fleet.greet(deadline)

        self._start(fleet, start, options.start_timeout)
