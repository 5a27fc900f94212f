"""Fakes of everything around the engine: a tokenizer of letters, a scheduler of a page, an executor that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.executor import Executor, ExecutorFailed
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.scheduler import PauseState, RequestStatus, Scheduler
from pegboard.contracts.tokenizer import ChatTemplateError, Tokenizer
from pegboard.engine.llm_engine import LLMEngine
from pegboard.plugins import GrammarProvider, PluginHost, SchedulerProvider
from pegboard.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVCacheConfig,
    KVCacheSpec,
    Logprobs,
    MemoryReport,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)

LETTERS = "\0abcdefghijklmnopqrstuvwxyz .!?ABCDEFGHIJKLMNOPQRSTUVWXYZ<>/:\n"
EOS = 0


class LetterTokenizer(Tokenizer):
    """One token per letter; id 0 is the end-of-sequence token. ``bos`` puts it in front of prompts. Other characters have no
    token: they encode to nothing."""

    def __init__(self, bos: bool = False, vocab_size: int = len(LETTERS)) -> None:
        self._bos, self._size = bos, vocab_size

    vocab_size = property(lambda self: self._size)  # type: ignore[assignment]
    eos_token_id = EOS  # type: ignore[assignment]
    special_ids = frozenset([EOS])  # type: ignore[assignment]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [EOS] * (self._bos and add_special_tokens) + [LETTERS.index(c) for c in text if c in LETTERS]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in token_ids if i < len(LETTERS) and not (skip_special_tokens and i == EOS))
        return "".join("<eos>" if i == EOS else LETTERS[i] for i in kept)

    def token_text(self, token_id: int) -> str | None:
        return "<eos>" if token_id == EOS else LETTERS[token_id] if token_id < len(LETTERS) else None

    def token_bytes(self, token_id: int) -> bytes | None:
        return LETTERS[token_id].encode() if EOS < token_id < len(LETTERS) else None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **_: Any
    ) -> list[int]:
        if any(m["role"] not in ("user", "assistant", "system") for m in messages):
            raise ChatTemplateError("only user, assistant and system may speak")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return self.encode(text + ("assistant: " if add_generation_prompt else ""))


class PageScheduler(Scheduler):
    """Everything runs at once, prompts in one piece; one request per slot. Requests with ``ext["halves"]`` sample in the second
    half of a step."""

    def __init__(self, kv_config: KVCacheConfig) -> None:
        self.kv_config = kv_config
        self.requests: dict[str, EngineCoreRequest] = {}
        self.slots: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.busy: set[str] = set()
        self.gone: list[int] = []
        self.steps = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if len(request.prompt_token_ids) > self.kv_config.tokens_per_request(1):
            raise ValueError("the prompt can never fit the KV pool")
        self.requests[request.request_id] = request
        self.slots[request.request_id] = next(i for i in range(1000) if i not in self.slots.values())
        self.tokens[request.request_id] = []

    def schedule(self) -> SchedulerOutput:
        self.steps += 1
        plan = SchedulerOutput(step_id=self.steps, finished_slots=self.gone)
        self.gone = []
        for rid in [r for r in self.requests if r not in self.busy]:
            request, done = self.requests[rid], self.tokens[rid]
            if not done:
                plan.new_requests.append(
                    NewRequestData(
                        slot=self.slots[rid],
                        request_id=rid,
                        token_ids=request.prompt_token_ids,
                        prompt_len=len(request.prompt_token_ids),
                        sampling=request.sampling,
                        stop_token_ids=request.stop_token_ids,
                        block_ids=[[]],
                    )
                )
            plan.slots.append(self.slots[rid])
            plan.num_scheduled_tokens.append(1 if done else len(request.prompt_token_ids))
            plan.num_computed_tokens.append(len(request.prompt_token_ids) + len(done) - 1 if done else 0)
            plan.num_to_sample.append(1)
            self.busy.add(rid)
            if "halves" in request.ext:
                plan.grammar_slots.append(self.slots[rid])
        return plan

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        news = []
        by_slot = {s: r for r, s in self.slots.items()}
        for row, slot in enumerate(output.slots):
            rid = by_slot.get(slot)
            if rid is None:
                continue
            self.busy.discard(rid)
            request, new = self.requests[rid], output.sampled_token_ids[row]
            self.tokens[rid] += new
            item = EngineCoreOutput(request_id=rid, new_token_ids=new, logprobs=output.logprobs.get(row, []))
            item.prompt_logprobs = output.prompt_logprobs.get(row, [])
            if row in output.errors:
                item.finish_reason, item.stop_reason = FinishReason.ERROR, output.errors[row]
            elif new and new[-1] in request.stop_token_ids:
                item.finish_reason, item.stop_reason = FinishReason.STOP, new[-1]
            elif len(self.tokens[rid]) >= request.max_tokens:
                item.finish_reason = FinishReason.LENGTH
            if item.finish_reason is not None:
                self._drop(rid)
            news.append(item)
        return news

    def _drop(self, rid: str) -> None:
        del self.requests[rid], self.tokens[rid]
        self.busy.discard(rid)
        self.gone.append(self.slots.pop(rid))

    def finish_requests(self, request_ids: Iterable[str] | None, status: RequestStatus) -> list[str]:
        ended = [r for r in (list(self.requests) if request_ids is None else request_ids) if r in self.requests]
        for rid in ended:
            self._drop(rid)
        return ended

    def has_requests(self) -> bool:
        return bool(self.requests or self.gone)

    def set_pause_state(self, state: PauseState) -> None: ...

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def stats(self) -> SchedulerStats:
        return SchedulerStats(step=self.steps, num_running=len(self.requests))

    def check_integrity(self) -> None: ...


class ScriptedExecutor(Executor):
    """Says, for each request, the ids of ``script[request_id]`` and then end of sequence; the i-th of several answers those of
    ``script["request_id#i"]``, if there are any. Futures complete when asked for in order, or at once."""

    script: dict[str, Any]
    batches = 1

    def _init_executor(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.rows: dict[int, tuple[str, int]] = {}
        self.fail_at: int | None = None
        self.masked: list[Any] = []
        self.held_back: ModelRunnerOutput | None = None
        self.callbacks: list[Callable[[BaseException], None]] = []
        self.stopped = 0

    max_concurrent_batches = property(lambda self: self.batches)  # type: ignore[assignment]

    def collective_rpc(
        self, method: Any, args: Any = (), kwargs: Any = None, *, timeout: Any = None, non_block: bool = False, ranks: Any = "all"
    ) -> Any:
        if self.stopped:
            raise ExecutorFailed("shut down")
        self.calls.append((method, args))
        if not non_block:
            return [getattr(self, f"_{method}")(*args)]
        future: Future[Any] = Future()
        try:
            future.set_result([getattr(self, f"_{method}")(*args)])
        except Exception as error:
            future.set_exception(error)
        return future

    def _get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer.0": KVCacheSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")}

    def _determine_available_memory(self) -> MemoryReport:
        return MemoryReport(weights=0, activations=0, resident=0, available=256 * 100, reason="as the test says")

    def _initialize_cache(self, kv_config: KVCacheConfig) -> None: ...

    def _compile_or_warm_up(self) -> None: ...

    def _set_vocab_limit(self, limit: int) -> None:
        self.vocab_limit = limit

    def _execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        if self.fail_at is not None and plan.step_id >= self.fail_at:
            raise MemoryError("no room left on the device")
        for slot in plan.finished_slots:
            self.rows.pop(slot, None)
        for new in plan.new_requests:
            self.rows[new.slot] = (new.request_id, 0)
        output = ModelRunnerOutput(step_id=plan.step_id, slots=list(plan.slots), sampled_token_ids=[])
        for new in plan.new_requests:
            if new.sampling.prompt_logprobs is not None:
                entries = [Logprobs([t, 5, 6], [-1.5, -0.5, -2.0], 2) for t in new.token_ids[1:]]
                output.prompt_logprobs[plan.slots.index(new.slot)] = entries
        for row, slot in enumerate(plan.slots):
            rid, said = self.rows[slot]
            line = self._line(rid)
            token = line[said] if said < len(line) else EOS
            if isinstance(token, str):
                output.errors[row] = token
                output.sampled_token_ids.append([])
                continue
            chunk = token if isinstance(token, list) else [token]
            self.rows[slot] = (rid, said + 1)
            output.sampled_token_ids.append(chunk)
            output.logprobs[row] = [Logprobs([t, 5, 6], [-1.5, -0.5, -2.0], 2) for t in chunk]
        if plan.grammar_slots:
            self.held_back = output
            return None
        return output

    def _line(self, core_id: str) -> list[Any]:
        answer = core_id.rpartition("@")[0]
        line: list[Any] = self.script.get(answer) or self.script.get(answer.rpartition("#")[0], [])
        return line

    def _sample_tokens(self, grammar: Any) -> ModelRunnerOutput:
        self.masked.append(grammar)
        assert self.held_back is not None
        return self.held_back

    def check_health(self) -> None:
        if self.stopped:
            raise ExecutorFailed("shut down")

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        self.callbacks.append(callback)

    def _shutdown(self) -> None:
        self.stopped += 1


class FakeComposition:
    """As much of a composition as the engine uses."""

    def __init__(self, config: EngineConfig, script: dict[str, Any], tokenizer: Tokenizer, **facts: Any) -> None:
        self.config, self.script, self.tokenizer = config, script, tokenizer
        self.host = PluginHost.load(discovery=False, extra=facts.pop("plugins", {}))
        self.batches = facts.pop("batches", 1)
        capabilities = facts.pop("capabilities", frozenset({"grammars", "prompt_logprobs"}))
        self.parts: dict[str, Any] = {"scheduler": SchedulerProvider(name="page", target="", capabilities=capabilities)}
        self.grammar = facts.pop("grammar", None)
        if self.grammar is not None:
            self.parts["grammar"] = GrammarProvider(name="fake", target="")
        self.extensions = {"logits_processor": tuple(facts.pop("logits_processors", ()))}
        self.loggers = facts.pop("stat_loggers", {})
        self.sinks = facts.pop("event_sinks", {})
        generation = facts.pop("generation_config", {})
        self.source = ModelSource("fake", "/fake", "fake", "fake", facts.pop("model_config", {}), generation)
        sizes = {"vocab_size": len(LETTERS), "hidden_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": 8}
        self.spec = ModelSpec(architecture="Fake", **{**sizes, "max_model_len": 128, **facts})

    def create(self, kind: str, **available: Any) -> Any:
        if kind == "executor":
            ScriptedExecutor.batches = self.batches
            executor = ScriptedExecutor(self.config, self)  # type: ignore[arg-type]
            executor.script = self.script
            return executor
        if kind == "grammar":
            return self.grammar() if callable(self.grammar) else self.grammar
        return {"scheduler": lambda: PageScheduler(available["kv_config"]), "tokenizer": lambda: self.tokenizer}[kind]()

    def create_all(self, kind: str, **available: Any) -> dict[str, Any]:
        return {"stat_logger": self.loggers, "event_sink": self.sinks}[kind]


MakeEngine = Callable[..., LLMEngine]


@pytest.fixture
def make_engine() -> Iterable[MakeEngine]:
    """``make_engine({"id": "what it says"}, config fields, facts of the model)``."""
    engines: list[LLMEngine] = []

    def make(
        script: Mapping[str, Any] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        tokenizer: Tokenizer | None = None,
        **facts: Any,
    ) -> LLMEngine:
        lines = {r: [LETTERS.index(c) for c in said] if isinstance(said, str) else said for r, said in (script or {}).items()}
        composition = FakeComposition(
            EngineConfig(model="fake", **(config or {})), lines, tokenizer or LetterTokenizer(), **facts
        )
        engine = LLMEngine.from_prepared(SimpleNamespace(composition=composition, config=composition.config))  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def executor_of() -> Callable[[LLMEngine], ScriptedExecutor]:
    return lambda engine: engine.client.core.executor  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def letters() -> Callable[..., LetterTokenizer]:
    return LetterTokenizer
