"""ExternalLauncherExecutor: a launcher has started one process per rank, and each runs an engine of its own."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import msgspec

from pegboard.contracts.executor import ALL, HEALTH_SECONDS, Executor, ExecutorFailed, Ranks
from pegboard.contracts.worker import Worker, resolve_method
from pegboard.wire import ModelRunnerOutput
from pegboard_plugins.executors.launched import agreement, points
from pegboard_plugins.executors.launched.cohort import Cohort
from pegboard_plugins.executors.launched.meeting import meet
from pegboard_plugins.executors.launched.place import read_place
from pegboard_plugins.executors.launched.points import Point
from pegboard_plugins.options import StandardOptions


class ExternalLauncherExecutor(Executor):
    """torchrun, Slurm or another launcher starts a process per rank, all with one script. Each holds an engine and, on a thread,
    the worker of its rank. The engines plan alike, so plans are not sent: every call of this executor is made by all ranks.

    Invariants beside those of ``Executor``:

    - A call begins when all ranks have made it. Ranks that have made different calls, or have different plans, get
      ``DriftError`` instead, all of them, and the executor has failed.
    - Results are equal on all ranks. Calls whose time-out rank 0 finds exceeded end so on all.
    - Calls from several threads have no common order; ``check_health`` alone may be called by one rank, at any time.
    - The end of a rank's process, or of its engine while others wait for it, fails the executor on all ranks.

    A call that overruns its time-out goes on, as does one that had not begun. An object that is forgotten without ``shutdown``
    leaves the others when it is collected, at the latest when the interpreter ends.
    """

    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True

    def _init_executor(self) -> None:
        options = self.composition.options("standard") or StandardOptions()
        settings, size = self.config.executor, self.world.size
        tp, pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
        sizes = f"executor.tensor_parallel_size x executor.pipeline_parallel_size = {tp} x {pp}"
        place = read_place(size, sizes, options.launch_address)
        peers, address = meet(place, options.launch_timeout)
        self._cohort = Cohort(place.rank, size, peers)
        self._finalizer = weakref.finalize(self, self._cohort.stop)
        self._methods: dict[str, Callable[..., Any]] = {}
        try:
            self._cohort.listen()
            agreement.compare(self._cohort, self.composition)
            hosts = agreement.find_hosts(self._cohort)
            self.composition = agreement.check_communicator(self.composition, hosts)
            self.world = msgspec.structs.replace(
                self.world,
                rank=place.rank,
                local_rank=agreement.local_rank(place, hosts),
                local_size=hosts.count(hosts[place.rank]),
                rendezvous=agreement.make_rendezvous(self._cohort, hosts, address, os.path.isdir),
            )
            self._cohort.call(Point("the start of the workers", {}), self._start_worker, range(size)).result()
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
        except BaseException:
            self.shutdown()
            raise

    def _start_worker(self) -> None:
        worker: Worker = self.composition.create("worker", world=self.world)
        self._worker = worker
        self._cohort.check, self._cohort.thread.at_end = worker.check_health, worker.shutdown

    @property
    def num_engines(self) -> int:
        return self.world.size

    def gather(self, what: str, value: Any) -> list[Any]:
        return self._cohort.gather(what, value).result()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        ranks: Ranks = ALL,
    ) -> Any:
        asked = self._asked(ranks)
        function = partial(self._function(method), *args, **(kwargs or {}))
        name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__qualname__)
        whom = "" if ranks == ALL else f", ranks={list(asked)}"
        future = self._cohort.call(Point(f"collective_rpc({name!r}{whom})", {}), function, asked, timeout)
        return future if non_block else future.result()

    def check_health(self) -> None:
        self._cohort.check_health(self.config.executor.step_timeout or HEALTH_SECONDS)

    def waits_for(self) -> str:
        return self._cohort.waits_for()

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        self._cohort.failure.register(callback)

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        """A step that outlasts ``executor.step_timeout`` is a hung worker: the executor has failed."""
        point = points.of_plan(argument) if method == "execute_model" else points.of_grammar(argument)
        future = self._cohort.step(
            point,
            partial(self._function(method), argument),
            self._news,
            partial(self._output, point.what),
            self.config.executor.step_timeout,
        )
        return future if non_block else future.result()

    def _shutdown(self) -> None:
        if hasattr(self, "_finalizer"):
            self._finalizer()

    # -- what a step brings ------------------------------------------------------------------------------------------

    def _news(self, output: ModelRunnerOutput | None) -> tuple[int | None, bytes | None]:
        """For the other ranks: a sum of this rank's tokens if it is of the last stage, which alone has any; and for the ranks of
        other stages, all that the output rank has."""
        if not self.world.is_last_stage:
            return None, None
        whole = self.world.pp_size > 1 and self.world.rank == self.world.output_rank
        return points.of_output(output), pickle.dumps(output, pickle.HIGHEST_PROTOCOL) if whole else None

    def _output(self, what: str, answers: dict[int, Any]) -> ModelRunnerOutput | None:
        """The same on all ranks. Raises ``DriftError`` where ranks of the last stage have sampled different tokens."""
        own: ModelRunnerOutput | None = answers[self.world.rank]
        output_rank, size = self.world.output_rank, self.world.size
        mine = {self.world.rank: points.of_output(own)} if self.world.is_last_stage else {}
        sums = mine | {rank: answers[rank][0] for rank in range(output_rank, size) if rank != self.world.rank}
        if len(set(sums.values())) > 1:
            raise points.drift_of_outputs(what, sums)
        if self.world.is_last_stage:
            return own
        return pickle.loads(answers[output_rank][1])  # type: ignore[no-any-return]

    # -- calls -------------------------------------------------------------------------------------------------------

    def _function(self, method: str | Callable[..., Any]) -> Callable[..., Any]:
        if not hasattr(self, "_worker"):
            raise ExecutorFailed("the executor was shut down")
        if callable(method):
            return partial(method, self._worker)
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = resolve_method(self._worker, method)
        return found
