"""The ranks of one engine, and the compiled graph to them."""

from __future__ import annotations

import logging
import time
from typing import ClassVar, Final

import ray

from pegboard.contracts.executor import ExecutorFailed
from pegboard.wire import World
from pegboard_executor_mp.calls import Call, Calls, Deadline, ranks_text
from pegboard_executor_mp.failure import Failure
from pegboard_executor_ray.crew import Crew
from pegboard_executor_ray.dag_rank import DagRank
from pegboard_executor_ray.graph import Graph
from pegboard_executor_ray.options import Options
from pegboard_executor_ray.ray_fleet import NODE_VERDICT_SECONDS, RayFleet

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS: Final = 0.2
"""For what actors have sent to other nodes to arrive there, before channels are closed."""


class DagFleet(RayFleet):
    actor_class: ClassVar[type[DagRank]] = DagRank

    def __init__(self, options: Options, world: World, step_timeout: float | None, calls: Calls, failure: Failure) -> None:
        super().__init__(options, world, step_timeout, calls, failure)
        self.one_node = True
        """This process and all ranks are on the same one."""
        self._graph: Graph | None = None

    @property
    def requests(self) -> Graph:
        assert self._graph is not None
        return self._graph

    def _connect(self, crew: Crew, deadline: Deadline) -> None:
        self.one_node = {crew.driver.node_id} == {place.node_id for place in crew.places}
        size = self._options.buffer_bytes
        try:
            self._graph = Graph(crew.actors, self._world, self.one_node, size, self._calls, self._before_error, self._broke)
        except ray.exceptions.RayError as error:
            self.raise_verdict(f"the graph to the ranks could not be compiled: {error}")

    def _broke(self, error: Exception) -> None:
        """In most cases because an actor is lost, which others are about to tell, with more to say."""
        if not self._failure.wait(NODE_VERDICT_SECONDS):
            self._fail_apart(ExecutorFailed(f"Ray no longer carries calls to the ranks: {type(error).__name__}: {error}"))

    def waits_for(self, call: Call) -> str:
        """The ranks that keep ``call`` waiting: those that have not carried out the one that is under way. Takes a moment: as
        answers come together, the ranks have to be asked."""
        current = None if self._graph is None else self._graph.current
        if current is None or self._crew is None or not self._crew.connected:
            return call.waits_for()
        done = self._ask(lambda actor: actor.has_done.remote(current))
        return ranks_text({rank for rank in range(self._world.size) if not done.get(rank)} or call.missing)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _wait_no_longer(self) -> None:
        if self._graph is not None:
            self._graph.hurry()

    def _dismiss(self, crew: Crew) -> None:
        graph = self._graph
        try:
            if crew.connected and (graph is None or self.hurry or not graph.end(self._options.shutdown_timeout)):
                self._kill(crew)
                if not self.one_node:
                    time.sleep(_LAST_WORDS_SECONDS)
            if graph is not None:
                graph.close(crew.connected)
        except Exception:
            log.log(logging.WARNING if crew.connected else logging.DEBUG, "closing the graph to the ranks failed", exc_info=True)
        finally:
            crew.stop(self.hurry)
