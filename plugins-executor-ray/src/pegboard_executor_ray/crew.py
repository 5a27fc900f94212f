"""Crew: the ranks of one engine, as actors on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import cloudpickle
import ray

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.engine.errors import EngineStartError
from pegboard.plugins import Composition
from pegboard.wire import World
from pegboard_executor_mp import launch
from pegboard_executor_mp.calls import Deadline, ranks_text
from pegboard_executor_ray import autostart
from pegboard_executor_ray.cluster import Cluster
from pegboard_executor_ray.environment import Surroundings
from pegboard_executor_ray.loss import how_it_ended, raised_by_ray, remedy
from pegboard_executor_ray.options import Options
from pegboard_executor_ray.place import Place, check_addresses, visible_devices
from pegboard_executor_ray.placement import TELL_SECONDS, Placement
from pegboard_executor_ray.rank_actor import RankActor
from pegboard_executor_ray.waiting import asking, let_shutdown_end, wait
from pegboard_executor_ray.watch import LOOK_SECONDS, Watch

log = logging.getLogger(__name__)

WATCH_GROUP: Final = "watch"
"""Ray's name for the thread of ``RankActor.stay``."""
END_SECONDS: Final = 5.0
"""How long to wait for the processes of actors that were killed."""


class Crew:
    """Made with all ranks started, each with its worker, which has done nothing yet: its methods are the executor's to call.

    ``actors``, ``places`` and ``worlds`` are in rank order. ``on_loss(error)`` is called once, from a thread, when a rank is lost
    that was not stopped.
    """

    def __init__(
        self,
        composition: Composition,
        options: Options,
        world: World,
        on_loss: Callable[[ExecutorFailed], None],
        actor_class: type[RankActor] = RankActor,
    ) -> None:
        """Raises ``PluginError`` for plugins that cannot be sent, ``EngineStartError`` where the cluster or the ranks' places
        will not do, ``WorkerError`` of a rank that cannot be set up, ``ExecutorFailed`` for one that ended, ``TimeoutError``."""
        launch.check_portable(composition)
        packed = cloudpickle.dumps(composition)
        self.options = options
        self.actors: Sequence[Any] = ()
        self.places: Sequence[Place] = ()
        self.worlds: Sequence[World] = ()
        self.one_node = True
        self._stays: Sequence[Any] = ()
        self._watch: Watch | None = None
        self._placement: Placement | None = None
        self._stop_lock = threading.Lock()
        self._name = f"pegboard-{secrets.token_hex(4)}"
        need = needs(options, composition)
        self._cluster = Cluster(options, need, world.size)
        autostart.hold()
        self._holds = True
        try:
            self._placement = Placement(options, need, world.size, self.driver.node_id, self._name)
            self._start(actor_class, world.size)
            deadline = Deadline(options.start_timeout)
            self._enter(composition, deadline)
            if not self.one_node:
                packed = cloudpickle.dumps(composition.across_hosts())
            self._set_up(packed, world, deadline)
        except BaseException:
            self.stop(hurry=True)
            raise
        self._watch = Watch(self._cluster, self._stays, self.places, on_loss)

    @property
    def driver(self) -> Place:
        return self._cluster.driver

    @property
    def connected(self) -> bool:
        """Ray can be asked."""
        return self._cluster.connected

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self, actor_class: type[RankActor], ranks: int) -> None:
        assert self._placement is not None
        groups: Any = {"concurrency_groups": {WATCH_GROUP: 1, **actor_class.groups}}
        remote = ray.remote(**groups)(actor_class)
        common = {"namespace": self.options.namespace, "lifetime": "non_detached", "max_restarts": 0}
        try:
            self.actors = [
                remote.options(
                    name=f"{self._name}-rank{rank}",
                    runtime_env=self.options.runtime_env or None,
                    **common,
                    **self._placement.options_of(rank),
                ).remote(rank)
                for rank in range(ranks)
            ]
        except (TypeError, ValueError) as error:
            settings = "runtime_env, num_cpus, num_gpus and resources of plugins.executor_ray"
            raise EngineStartError(f"Ray takes no actors that ask for this: {error}; see {settings}") from error
        self._stays = [actor.stay.options(concurrency_group=WATCH_GROUP).remote() for actor in self.actors]

    def _enter(self, composition: Composition, deadline: Deadline) -> None:
        options = self.options
        jobs, own = ray.get_runtime_context().runtime_env, options.runtime_env
        runtime_env = {**jobs, **own, "env_vars": {**jobs.get("env_vars", {}), **own.get("env_vars", {})}}  # as Ray joins them
        here = Surroundings.here(
            options.environment_block, options.environment_carry, runtime_env, files=[composition.source.path]
        )
        surroundings = pickle.dumps(here)
        entering = {rank: actor.enter.remote(surroundings) for rank, actor in enumerate(self.actors)}
        self.places = self.results(entering, deadline, "no process")
        check_addresses([self.driver, *self.places])
        self.one_node = len({place.node_id for place in self.places}) == 1

    def _set_up(self, composition: bytes, world: World, deadline: Deadline) -> None:
        nodes = [place.node_id for place in self.places]
        opening = {0: self.actors[0].open_rendezvous.remote(self.one_node)}
        (rendezvous,) = self.results(opening, deadline, "no rendezvous")
        self.worlds = [
            World(
                rank=rank,
                local_rank=nodes[:rank].count(node),
                local_size=nodes.count(node),
                tp_size=world.tp_size,
                pp_size=world.pp_size,
                rendezvous=rendezvous,
            )
            for rank, node in enumerate(nodes)
        ]
        told = ray.put(composition)
        visible = {node: visible_devices(self.places, node) for node in set(nodes)}
        making = {
            rank: actor.set_up.remote(told, self.worlds[rank], visible[nodes[rank]]) for rank, actor in enumerate(self.actors)
        }
        self.results(making, deadline, "no worker")

    def results(self, calls: Mapping[int, Any], deadline: Deadline, lacks: str) -> list[Any]:
        """The results of ``calls``, in their order; raises what the first rank that fails fails of. ``lacks``: what a rank
        without an answer does not have."""
        waiting = {ref: rank for rank, ref in calls.items()}
        results: dict[int, Any] = {}
        told = time.monotonic()
        while waiting:
            left = deadline.left()
            assert left is not None
            done, _ = wait(list(waiting), min(left, LOOK_SECONDS), needed=1)
            for ref in done:
                rank = waiting.pop(ref)
                results[rank] = self._result(rank, ref)
            late = f"{ranks_text(waiting.values())} {'have' if len(waiting) > 1 else 'has'} {lacks}"
            if waiting and not done and not deadline.left():
                limit = f"plugins.executor_ray.start_timeout={deadline.seconds:g} s"
                raise TimeoutError(
                    f"{late} after {limit}; are the bundles of the placement group in use, or does a runtime_env take that long?"
                )
            if waiting and time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                log.warning("still starting: %s yet", late)
        return [results[rank] for rank in calls]

    def _result(self, rank: int, ref: Any) -> Any:
        assert self._placement is not None
        place = self.places[rank] if self.places else None
        bundle = self._placement.bundles[rank]
        where = place.node if place else f"node {bundle.address} ({bundle.node[:8]})"
        try:
            with asking:
                result, error = ray.get(ref)
        except ray.exceptions.RayError as cause:
            who = f"worker rank {rank} on {where}"
            raise ExecutorFailed(f"{who}, which was starting, {how_it_ended(cause)}{remedy(cause)}") from cause
        if error is None:
            return result
        told = WorkerError(*error)
        raise WorkerError(rank, told.error_type, f"{told.message} (on {where})", told.traceback_text)

    # -- the end -------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """The ranks, whatever they do; returns when they have ended. ``stop`` does the rest."""
        if self._cluster.connected:
            for actor in self.actors:
                ray.kill(actor)
            if self._stays:
                wait(self._stays, END_SECONDS)

    def stop(self, hurry: bool = False) -> None:
        """End everything that was started here, in bounded time. Idempotent. ``hurry``: workers are not asked to shut down."""
        if self._watch is not None:
            self._watch.close()
        let_shutdown_end()
        with self._stop_lock:
            try:
                if self._cluster.connected:
                    self._end_actors(hurry)
            except (Exception, SystemExit) as error:
                if not raised_by_ray(error) or self._cluster.connected:
                    raise
                log.debug("Ray was shut down, and the ranks with it", exc_info=True)
            finally:
                if self._watch is not None:
                    self._watch.join()  # before Ray goes
                self._cluster.leave()
                if self._holds:
                    self._holds = False
                    autostart.release()

    def _end_actors(self, hurry: bool) -> None:
        try:
            if self.actors and not hurry:
                leaving = [actor.shutdown.remote() for actor in self.actors]
                wait(leaving, self.options.shutdown_timeout)
        finally:
            try:
                self.kill()
                self.actors = ()
            finally:
                if self._placement is not None:
                    self._placement.remove()
        stays, self._stays = list(self._stays), ()
        if stays:
            with contextlib.suppress(ray.exceptions.RayError):
                wait(stays, END_SECONDS)


def needs(options: Options, composition: Composition) -> dict[str, float]:
    """What one rank reserves. Raises ``EngineStartError`` for nothing at all: ranks are placed by what they reserve."""
    on_cpu = composition.parts["platform"].name == "cpu"
    threads = composition.config.executor.num_threads or 1
    cpus = options.num_cpus if options.num_cpus is not None else float(threads if on_cpu else 0)
    gpus = options.num_gpus if options.num_gpus is not None else float(not on_cpu)
    need = {name: amount for name, amount in {"CPU": cpus, "GPU": gpus, **options.resources}.items() if amount}
    if not need:
        raise EngineStartError(
            "ranks reserve nothing, so that Ray could not place them; set plugins.executor_ray.num_cpus, num_gpus or resources"
        )
    return need
