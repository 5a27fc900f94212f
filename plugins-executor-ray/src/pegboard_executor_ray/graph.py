"""The compiled graph that carries an engine's calls to its ranks, and their answers back."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode

from pegboard.contracts.executor import WorkerError
from pegboard.contracts.transport import Closed
from pegboard.wire import World
from pegboard_executor_mp.calls import Calls
from pegboard_executor_mp.messages import Reply, Request
from pegboard_executor_mp.replies import BeforeError, take_reply
from pegboard_executor_ray import apart, autostart, quiet
from pegboard_executor_ray.dag_rank import APART, END, INLINE, NOTHING, CallFailed

ROOM: Final = 4096
"""Bytes of a buffer that are left for what Ray adds."""
FOREVER: Final = 1e6
"""Seconds. A read that timed out would lose what some ranks have answered already, a write what some have been sent; and -1 is
no time at all for some of Ray's channels. They end when the channels are closed, or an actor is lost."""
CLOSE_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 0.05

Answer = bytes | CallFailed
_compiling = threading.Lock()


class Graph:
    """One input, which the ranks of the first stage read. A rank of any stage but the last hands what it has read to its place in
    the next one, then carries it out; stages meet again where hidden states pass, through the workers' own links. Every rank has
    an output, so that an error is heard of while others still wait for the rank that has it; those that are not to answer put
    next to nothing there.

    ``one_node``: this process and all ranks are on the same one. Otherwise there is one call in the graph at a time. A channel to
    another node has one buffer there; while that is full the node's raylet waits for the reader, deaf to all else, and it ends if
    the channel is closed meanwhile. So nothing may be sent that somebody does not wait for.

    Calls are carried out, and answered, in the order of ``put``. All dealings with Ray are in threads of its own, where no
    interrupt can cut a message in two. ``broke(error)`` is called, once, when Ray does not carry messages any more.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        world: World,
        one_node: bool,
        buffer_bytes: int,
        calls: Calls,
        before_error: BeforeError,
        broke: Callable[[Exception], None],
    ) -> None:
        self._actors, self._calls, self._before_error, self._broke = tuple(actors), calls, before_error, broke
        self._largest = buffer_bytes - ROOM
        self._one_node = one_node
        in_flight = 2 * world.pp_size + 2 if one_node else 1  # both halves of every step under way, and calls between them
        self._room = threading.Semaphore(in_flight)
        self._numbers = itertools.count()
        self._closed = False
        self._over, self._all_ended = threading.Event(), False
        self.current: int | None = None
        """The call whose answers are waited for; those after it wait for them too."""
        self._waiting: queue.SimpleQueue[tuple[int | None, bytes] | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[tuple[int | None, list[Any]] | None] = queue.SimpleQueue()
        ray.get([actor.prepare_graph.remote(buffer_bytes, self._largest, in_flight) for actor in self._actors])
        self._compiled = _compile(self._actors, world, buffer_bytes, in_flight)
        _close_ourselves(self._compiled, lambda: self._break(RuntimeError("a rank has left the graph")))
        self._threads = [
            autostart.never_from(threading.Thread(target=target, name=f"pegboard-ray-{name}", daemon=True))
            for name, target in (("requests", self._send), ("replies", self._take))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, message: tuple[Any, ...], timeout: float | None = None) -> None:
        """``message``: a ``Request``, as a plain tuple. Does not wait. Raises ``Closed``."""
        if self._closed:
            raise Closed("the graph to the ranks is closed")
        self._waiting.put((Request(*message).call, pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))

    def end(self, timeout: float) -> bool:
        """Have the ranks shut their workers down, after the calls that they carry out; those that wait are dropped. Whether all
        have done so within ``timeout`` seconds."""
        self._closed = True
        for actor in self._actors:
            actor.drop_calls.remote()
        self._waiting.put((None, END))
        self._over.wait(timeout)
        return self._all_ended

    def hurry(self) -> None:
        """From any thread: ``end`` waits no longer."""
        self._over.set()

    def close(self, connected: bool) -> None:
        """Bounded in time if no call is being carried out any more, or the actors were killed. ``connected``: Ray can be asked;
        otherwise it has torn the graph down itself."""
        self._closed = True
        self._waiting.put(None)
        self._room.release()
        closing = apart.run("close", self._tear_down, connected)
        for thread in (closing, *self._threads):
            if thread is not None and thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def _tear_down(self, connected: bool) -> None:
        quiet.here()
        compiled, self._compiled = self._compiled, None
        if compiled is not None and connected:
            _let_ray_close(compiled)
            compiled.teardown()
            proxy = getattr(compiled, "_proxy_actor", None)  # ends with the graph's last reference, which a traceback may hold
            if proxy is not None:
                ray.kill(proxy)

    # -- to the ranks ----------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            while (item := self._waiting.get()) is not None:
                call, data = item
                self._room.acquire()
                try:
                    message = data if call is None else self._message(data)
                except ray.exceptions.RayActorError:
                    raise
                except Exception as error:  # there is no room for it in the object store, for one
                    assert call is not None
                    self._calls.fail(call, error)
                    self._room.release()
                    continue
                compiled = self._compiled
                if compiled is None:
                    break
                self._sent.put((call, compiled.execute(message)))
        except Exception as error:
            self._break(error)
        finally:
            self._sent.put(None)

    def _message(self, data: bytes) -> bytes:
        """What goes through the graph; the content of a large one goes ahead."""
        if len(data) < self._largest:
            return INLINE + data
        number, content = next(self._numbers), ray.put(data)
        ray.get([actor.bring.remote(number, content) for actor in self._actors])
        return APART + str(number).encode()

    # -- and back --------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        try:
            while (sent := self._sent.get()) is not None:
                call, refs = sent
                self.current = call
                answers = [_answer(ref) for ref in refs]  # each of them has to be taken
                if call is None:
                    self._all_ended = True
                    break
                self._answered(call, answers)
                self._room.release()
                self.current = None
                del sent, refs, answers  # hold nothing while idle
        except Exception as error:
            self._break(error)
        finally:
            self._over.set()

    def _answered(self, call: int, answers: list[Answer]) -> None:
        for rank, answer in enumerate(answers):
            if isinstance(answer, CallFailed):  # then all are
                take_reply(answer.rank, Reply(*answer.reply), self._calls, self._before_error)
                if not self._one_node:
                    self._settle(call)
                return
            if answer[:1] == APART:
                answer = self._fetch(call, rank)
            if answer != NOTHING:
                take_reply(rank, Reply(*pickle.loads(memoryview(answer)[1:])), self._calls, self._before_error)

    def _fetch(self, call: int, rank: int) -> bytes:
        content = self._actors[rank].fetch.remote(call)
        if not self._calls.is_open(call):
            return NOTHING
        try:
            return INLINE + bytes(ray.get(content))
        except ray.exceptions.RayTaskError as error:  # there is no room for it in the object store, for one
            self._calls.fail(call, WorkerError.of(rank, error))
            return NOTHING

    def _settle(self, call: int) -> None:
        """Until every rank has carried ``call`` out, of which one has failed."""
        for actor in self._actors:
            while not self._closed and not ray.get(actor.has_done.remote(call)):
                time.sleep(_SETTLE_SECONDS)

    def _break(self, error: Exception) -> None:
        if not self._closed:
            self._broke(error)


def _answer(ref: Any) -> Answer:
    try:
        return ref.get(FOREVER)  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CallFailed):
            return error.cause
        raise


def _compile(actors: Sequence[Any], world: World, buffer_bytes: int, in_flight: int) -> Any:
    with InputNode() as root:
        outputs, before = [], [root] * world.tp_size
        for stage in range(world.pp_size):
            ranks = actors[stage * world.tp_size : (stage + 1) * world.tp_size]
            passed = (
                [actor.pass_on.bind(node) for actor, node in zip(ranks, before, strict=True)] if stage + 1 < world.pp_size else []
            )
            outputs += [actor.serve.bind(node) for actor, node in zip(ranks, before, strict=True)]
            before = passed
    with _buffers_of(buffer_bytes):
        return MultiOutputNode(outputs).experimental_compile(
            _submit_timeout=FOREVER, _buffer_size_bytes=buffer_bytes, _max_inflight_executions=in_flight
        )


def _close_ourselves(compiled: Any, ended: Callable[[], None]) -> None:
    """Ray has a thread that closes the channels as soon as the loop in an actor ends, while other ranks may still send. That has
    to wait until they are killed: instead the thread calls ``ended``."""
    monitor = getattr(compiled, "_monitor", None)
    if monitor is not None:
        quiet.thread(autostart.never_from(monitor))
        close = monitor.teardown
        monitor.teardown = lambda kill_actors=False: close(kill_actors=True) if kill_actors else ended()


def _let_ray_close(compiled: Any) -> None:
    monitor = getattr(compiled, "_monitor", None)
    if monitor is not None:
        del monitor.teardown


@contextlib.contextmanager
def _buffers_of(size: int) -> Iterator[None]:
    """What a graph is compiled with does not reach all of its channels, only what holds for this process does."""
    context = DAGContext.get_current()
    with _compiling:
        before, context.buffer_size_bytes = context.buffer_size_bytes, size
        try:
            yield
        finally:
            context.buffer_size_bytes = before
