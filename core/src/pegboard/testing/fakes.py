"""Fakes without torch: a model that is a function, a runner and a worker that compute it, an executor that runs them here."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pegboard.contracts.executor import ALL, Executor, ExecutorFailed, Ranks, WorkerError
from pegboard.contracts.worker import Worker, resolve_method
from pegboard.testing.fake_grammars import allowed_by, first_allowed
from pegboard.testing.mirror import MirrorRow, MirrorWorker
from pegboard.testing.windows import first_token
from pegboard.wire import (
    GrammarOutput,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    Logprobs,
    MemoryReport,
    ModelRunnerOutput,
    SchedulerOutput,
    World,
)

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins import Composition

NextToken = Callable[[Sequence[int]], int]
"""A whole model: all tokens so far to the next one."""


def hash_model(vocab_size: int = 1000, low: int = 0) -> NextToken:
    """Any change of any earlier token changes the next one, in [low, vocab_size)."""

    def next_token(token_ids: Sequence[int]) -> int:
        return low + zlib.crc32(array("q", token_ids).tobytes()) % (vocab_size - low)

    return next_token


def scripted_model(answers: Mapping[tuple[int, ...], Sequence[int]], then: int = 0) -> NextToken:
    """Each prompt is answered with its script, then with ``then`` for ever. Raises ``KeyError`` on another prompt."""

    def next_token(token_ids: Sequence[int]) -> int:
        for length in range(len(token_ids), 0, -1):
            script = answers.get(tuple(token_ids[:length]))
            if script is not None:
                position = len(token_ids) - length
                return script[position] if position < len(script) else then
        raise KeyError(f"no script for the prompt {list(token_ids)}")

    return next_token


VARIANT = "variant"
"""Key of a request's ``ext``. Requests with one prompt and distinct variants get distinct answers."""


def variant_of(next_token: NextToken, ext: Mapping[str, Any]) -> NextToken:
    """``next_token`` as a request with ``ext`` sees it: another model for each variant."""
    variant = ext.get(VARIANT)
    return next_token if variant is None else lambda token_ids: next_token([variant, *token_ids])


def fake_prompt_logprobs(token_ids: Sequence[int]) -> list[Logprobs]:
    """Entries for all tokens but the first, each of which depends on all tokens up to its own."""
    entries, prefix = [], 0
    for token in token_ids:
        prefix = zlib.crc32(token.to_bytes(8, "little", signed=True), prefix)
        entries.append(Logprobs([token], [-(prefix % 1000) / 100], 1))
    return entries[1:]


def fake_kv_config(
    num_blocks: int, block_size: int = 16, windows: Sequence[int | None] = (None,), num_host_blocks: int = 0
) -> KVCacheConfig:
    """``num_blocks`` counts the null block; ``windows`` has one entry per KV-cache group."""
    specs = [
        KVCacheSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=window)
        for window in windows
    ]
    groups = [KVCacheGroup(layers=[f"layers.{i}"], spec=spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, num_host_blocks=num_host_blocks)


class FakeRunner:
    """Computes plans with ``next_token`` in place of a model, and keeps a KV cache whose entries stand for whole prefixes.

    Before it samples it reads the cache through the request's block tables, and raises ``AssertionError`` unless every entry
    is the one that this request needs: a block freed too early, shared wrongly, copied at the wrong time or found under a wrong
    key shows at once. ``propose`` gives draft tokens after each sample; drafts that agree with ``next_token`` are accepted.
    """

    def __init__(self, mirror: MirrorWorker, next_token: NextToken, propose: Callable[[Sequence[int]], list[int]] | None = None):
        self.mirror, self.next_token, self.propose = mirror, next_token, propose
        self.fail_rows: dict[str, str] = {}
        """Request id to the message with which its row fails."""
        self.num_steps = 0
        self._cache: dict[int, list[int]] = {}
        self._prefixes: dict[int, list[int]] = {}

    def execute_model(self, plan: SchedulerOutput, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Both halves of a step. ``grammar``: masks for ``plan.grammar_slots``."""
        plan = self.mirror.apply(plan)
        self.num_steps += 1
        assert plan.grammar_slots == (grammar.slots if grammar is not None else []), "masks for other rows than the plan lists"
        assert grammar is None or grammar.step_id == plan.step_id, "masks of another step"
        self._copy_blocks(plan)
        for new in plan.new_requests:
            self._prefixes[new.slot] = []
        drafts = dict(zip(plan.spec_slots, plan.spec_token_ids, strict=True))
        output = ModelRunnerOutput(step_id=plan.step_id, slots=plan.slots, sampled_token_ids=[])
        kept: list[list[int]] = []
        for index, slot in enumerate(plan.slots):
            row, proposed = self.mirror.rows[slot], drafts.get(slot, [])
            computed, count = plan.num_computed_tokens[index], plan.num_scheduled_tokens[index]
            self._write(slot, row.token_ids + proposed, computed, count)
            if row.sampling.prompt_logprobs is not None and computed < row.prompt_len - 1 and count:
                entries = fake_prompt_logprobs(row.token_ids[: row.prompt_len])
                output.prompt_logprobs[index] = entries[computed : computed + count]
            tokens: list[int] = []
            if row.request_id in self.fail_rows:
                output.errors[index] = self.fail_rows[row.request_id]
            elif plan.num_to_sample[index]:
                tokens = self._sample(row, proposed)
                if grammar is not None and slot in grammar.slots:
                    tokens = [first_allowed(tokens[0], allowed_by(grammar, slot))]
            output.sampled_token_ids.append(tokens)
            kept.append(tokens or [0] * min(1, plan.num_to_sample[index]))  # plans made already may go on with a failed row
            if self.propose is not None:
                output.draft_token_ids.append(self.propose(row.token_ids + tokens) if tokens else [])
        self.mirror.sampled(plan, kept)
        return output

    def _sample(self, row: MirrorRow, proposed: list[int]) -> list[int]:
        next_token, token_ids = variant_of(self.next_token, row.ext), row.token_ids
        tokens = [next_token(token_ids)]
        for draft in proposed:
            if draft != tokens[-1]:
                break
            tokens.append(next_token(token_ids + tokens))
        return tokens

    def _write(self, slot: int, token_ids: list[int], computed: int, count: int) -> None:
        """Fill the cache for ``count`` tokens after ``computed``, and check all that came before, but for a block that the next
        plan will fill by a copy."""
        row, prefixes, size = self.mirror.rows[slot], self._prefixes[slot], self.mirror.block_size
        del prefixes[computed:]  # rejected drafts
        for token in token_ids[len(prefixes) : computed + count]:
            prefixes.append(zlib.crc32(token.to_bytes(8, "little", signed=True), prefixes[-1] if prefixes else 0))
        num_blocks = len(prefixes) // size if row.due_copies else -(-len(prefixes) // size)
        for group, (blocks, window) in enumerate(zip(row.block_ids, self.mirror.kv_config.windows, strict=True)):
            data = [prefix ^ group << 32 for prefix in prefixes]  # other layers' data are others
            seen = first_token(computed, window)
            for place, block_id in enumerate(blocks[:num_blocks]):
                start = place * size
                if start + size <= seen:
                    continue
                entry = self._cache.setdefault(block_id, [0] * size)
                first, begin = min(max(computed - start, 0), size), max(seen - start, 0)
                assert entry[begin:first] == data[start + begin : start + first], (
                    f"slot {slot} ({row.request_id!r}): block {block_id} (place {place} of group {group}) holds other data"
                )
                fresh = data[start + first : start + size]
                entry[first : first + len(fresh)] = fresh

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        for source, destination in plan.block_copies:
            if source in self._cache:
                self._cache[destination] = list(self._cache[source])


class BootingWorker(Worker):
    """Boots through its phases without a device; ``calls`` notes them. A subclass gives specs and steps."""

    def __init__(self, config: EngineConfig, composition: Composition, world: World) -> None:
        super().__init__(config, composition, world)
        self.calls: list[str] = []

    def init_device(self) -> None:
        self.calls.append("init_device")

    def load_model(self) -> None:
        self.calls.append("load_model")

    def compile_or_warm_up(self) -> None:
        self.calls.append("compile_or_warm_up")

    def determine_available_memory(self) -> MemoryReport:
        self.calls.append("determine_available_memory")
        return MemoryReport(weights=0, activations=0, resident=0, available=1 << 20, reason="a fake worker's 1 MiB")

    def initialize_cache(self, kv_config: KVCacheConfig) -> None:
        self.calls.append("initialize_cache")


class RunnerWorker(BootingWorker):
    """A worker around ``FakeRunner``: answers every declared method of the step. A step with grammar rows is computed in its
    second half."""

    runner: FakeRunner
    _half: SchedulerOutput | None = None

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        size = self.config.kv_cache.block_size
        return {"layers.0": KVCacheSpec(block_size=size, num_kv_heads=1, head_size=8, dtype="float32")}

    def initialize_cache(self, kv_config: KVCacheConfig) -> None:
        super().initialize_cache(kv_config)
        limits = self.config.scheduler
        mirror = MirrorWorker(kv_config, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens)
        self.runner = FakeRunner(mirror, hash_model(self.composition.spec.vocab_size))

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        if plan.grammar_slots:
            self._half = plan
            return None
        return self.runner.execute_model(plan)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        plan, self._half = self._half, None
        if plan is None:
            raise ValueError("sample_tokens: no step waits for its second half")
        return self.runner.execute_model(plan, grammar)


class FakeExecutor(Executor):
    """One ``RunnerWorker``, called directly. Choose it as ``executor.name = "pegboard.testing.fakes:FakeExecutor"``.

    ``executor.worker.runner`` is where a test sets ``next_token`` or ``fail_rows``. ``fail(error)`` makes it fail for good.
    """

    supports_async_scheduling = True
    concurrent_batches: ClassVar[int] = 1

    @property
    def max_concurrent_batches(self) -> int:
        return self.concurrent_batches

    def _init_executor(self) -> None:
        self.worker = RunnerWorker(self.config, self.composition, self.world)
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._failure: BaseException | None = None
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")

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
        call = resolve_method(self.worker, method) if isinstance(method, str) else partial(method, self.worker)
        future: Future[list[Any]] = Future()
        try:
            self.check_health()
            replies = [call(*args, **(kwargs or {}))]
            future.set_result(replies if ranks == ALL else [replies[rank] for rank in ranks])
        except ExecutorFailed as error:
            future.set_exception(error)
        except Exception as error:
            failure = WorkerError(0, type(error).__name__, str(error))
            failure.__cause__ = error
            future.set_exception(failure)
        return future if non_block else future.result()

    def check_health(self) -> None:
        if self._failure is not None or self._is_shut_down:
            raise ExecutorFailed(str(self._failure or "the executor was shut down")) from self._failure

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        if self._failure is not None:
            callback(self._failure)
        else:
            self._callbacks.append(callback)

    def fail(self, error: BaseException) -> None:
        """Behave as if the worker had died of ``error``."""
        if self._failure is None:
            self._failure = error
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback(error)

    def _shutdown(self) -> None:
        self._callbacks.clear()
