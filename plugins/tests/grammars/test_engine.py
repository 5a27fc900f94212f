"""Grammars in the engine loop with the standard scheduler: on a fake model whose tokens have nothing to do with any language."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pegboard.config import EngineConfig, KVCacheSettings, SchedulerConfig
from pegboard.contracts.grammar import Grammar, GrammarState
from pegboard.engine.core import EngineCore
from pegboard.testing.conformance._grammar_cases import EOS, composition
from pegboard.testing.conformance.grammar import spelled
from pegboard.testing.driver import expected_output, make_group, make_request
from pegboard.testing.fake_composition import FakeComposition
from pegboard.testing.fakes import FakeExecutor, RunnerWorker, hash_model
from pegboard.wire import EngineCoreRequest, FinishReason, GrammarSpec, ModelRunnerOutput, SchedulerOutput
from pegboard_plugins.executors.uniproc import UniProcExecutor
from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend
from pegboard_plugins.kv.prefix import PrefixAllocator
from pegboard_plugins.scheduling.admission import DefaultAdmission
from pegboard_plugins.scheduling.chunking import DefaultChunking
from pegboard_plugins.scheduling.preemption import RecomputePreemption
from pegboard_plugins.scheduling.queues import FCFSQueue
from pegboard_plugins.scheduling.scheduler import DefaultScheduler

MODEL = hash_model(320)
REGEX = r"[a-f]{3,20}(-\d{2})?"


class Scheduler(DefaultScheduler):
    name = "default"
    capabilities = frozenset({"grammars", "prompt_logprobs"})


Boot = Callable[..., EngineCore]


@pytest.fixture
def boot(request: pytest.FixtureRequest) -> Boot:
    def make(depth: int = 1, blocks: int = 100, **parts: Any) -> EngineCore:
        base = composition()
        config = EngineConfig(
            model="none",
            scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6),
            kv_cache=KVCacheSettings(num_blocks=blocks, block_size=4),
        )

        class Executor(FakeExecutor):
            concurrent_batches = depth

        standard = {
            "executor": Executor, "scheduler": Scheduler, "grammar": LLGuidanceBackend, "tokenizer": base.parts["tokenizer"],
            "request_queue": FCFSQueue, "admission_policy": DefaultAdmission, "chunk_policy": DefaultChunking,
            "preemption_policy": RecomputePreemption, "kv_allocator": PrefixAllocator,
        }  # fmt: skip
        core = EngineCore(config, FakeComposition(config, {**standard, **parts}, base.spec))  # type: ignore[arg-type]
        request.addfinalizer(core.shutdown)
        return core

    return make


def bound(request_id: str, spec: GrammarSpec, prompt: int = 5, max_tokens: int = 60) -> EngineCoreRequest:
    request = make_request(request_id, range(40, 40 + prompt), max_tokens, stop_token_ids=EOS)
    return EngineCoreRequest(**{name: getattr(request, name) for name in request.__struct_fields__} | {"grammar": spec})


def run(core: EngineCore) -> dict[str, tuple[list[int], FinishReason, Any]]:
    tokens: dict[str, list[int]] = {}
    ended: dict[str, tuple[list[int], FinishReason, Any]] = {}
    until = time.monotonic() + 60
    while core.has_requests():
        assert time.monotonic() < until, f"not finished: {ended}"
        for output in core.step():
            assert output.request_id not in ended
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ended[output.request_id] = tokens[output.request_id], output.finish_reason, output.stop_reason
    assert core.grammars._running == {}
    assert core.stats().kv_usage == 0.0
    return ended


@pytest.mark.parametrize(("depth", "blocks"), [(1, 100), (2, 100), (3, 30)])
def test_answers_belong_to_their_languages_and_others_are_as_ever(boot: Boot, depth: int, blocks: int) -> None:
    core = boot(depth, blocks)
    schema = {"type": "object", "properties": {"a": {"enum": [1, "x"]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    plain = [make_request(f"plain{i}", range(i, i + 12), 30, stop_token_ids=[3]) for i in range(4)]
    bounded = [bound(f"json{i}", GrammarSpec("json_schema", json.dumps(schema)), prompt=5 + 9 * i) for i in range(3)]
    bounded += [bound(f"regex{i}", GrammarSpec("regex", REGEX), prompt=7 + i) for i in range(3)]
    bounded += [bound("choice", GrammarSpec("choice", '["yes", "no"]'))]
    for request in [*bounded, *plain]:
        core.add_request(request)
    ended = run(core)
    assert (core.stats().num_preemptions > 0) is (blocks < 50)
    for request in plain:
        assert ended[request.request_id][:2] == expected_output(request, MODEL), request.request_id
    for request in bounded:
        token_ids, reason, _ = ended[request.request_id]
        assert reason is FinishReason.STOP
        text = spelled([t for t in token_ids if t not in EOS])
        if request.request_id.startswith("json"):
            assert json.loads(text).keys() == {"a", "b"}
        elif request.request_id == "choice":
            assert text in ("yes", "no")
        else:
            assert re.fullmatch(REGEX, text), text


def test_answers_to_one_prompt_have_states_of_their_own(boot: Boot) -> None:
    core = boot(2)
    spec = GrammarSpec("regex", REGEX)
    group = [
        EngineCoreRequest(**{name: getattr(r, name) for name in r.__struct_fields__} | {"grammar": spec})
        for r in make_group("g", range(30), 4, 50, stop_token_ids=EOS)
    ]
    for request in group:
        core.add_request(request)
    together = run(core)
    alone = {}
    for request in group:
        core.add_request(request)
        alone |= run(core)
    assert together == alone
    assert len({tuple(tokens) for tokens, *_ in together.values()}) > 1


def test_an_answer_that_is_cut_off_ends_by_length(boot: Boot) -> None:
    core = boot()
    core.add_request(bound("a", GrammarSpec("regex", "[a-f]{30}"), max_tokens=4))
    [(token_ids, reason, _)] = run(core).values()
    assert (len(token_ids), reason) == (4, FinishReason.LENGTH)
    assert re.fullmatch("[a-f]+", spelled(token_ids))


class Passing(GrammarState):
    """Passes everything on; ``on_mask`` is called after each mask with how many there were."""

    def __init__(self, state: GrammarState, on_mask: Callable[[int], None]) -> None:
        self._state, self._on_mask, self._num_masks = state, on_mask, 0

    def accept(self, token_ids: Sequence[int]) -> bool:
        return self._state.accept(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._state.rollback(num_tokens)

    def fill_bitmask(self, bitmask: memoryview) -> None:
        self._state.fill_bitmask(bitmask)
        self._num_masks += 1
        self._on_mask(self._num_masks)

    @property
    def terminated(self) -> bool:
        return self._state.terminated


def watched(on_mask: Callable[[int], None], text: str) -> type[LLGuidanceBackend]:
    """A backend that calls ``on_mask`` for the grammar with ``text``."""

    class Watched(LLGuidanceBackend):
        def compile(self, spec: GrammarSpec) -> Grammar:
            grammar = super().compile(spec)
            if spec.text != text:
                return grammar
            return type("WatchedGrammar", (Grammar,), {"start": lambda _: Passing(grammar.start(), on_mask)})()

    return Watched


def fail_at_three(num_masks: int) -> None:
    if num_masks == 3:
        raise ValueError("the grammar has become too large")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(boot: Boot, depth: int) -> None:
    requests = [bound(f"good{i}", GrammarSpec("regex", REGEX), prompt=6 + i) for i in range(2)]
    alone = boot(depth)
    for request in requests:
        alone.add_request(request)
    expected = run(alone)
    core = boot(depth, grammar=watched(fail_at_three, "[a-f]{9}"))
    for request in (requests[0], bound("bad", GrammarSpec("regex", "[a-f]{9}")), requests[1]):
        core.add_request(request)
    ended = run(core)
    token_ids, reason, message = ended.pop("bad")
    assert (len(token_ids), reason, message) == (2, FinishReason.ERROR, "the grammar has become too large")
    assert ended == expected


def test_masks_are_computed_while_the_forward_runs(boot: Boot) -> None:
    """The worker's first half does not end before the mask is there: without overlap both would wait for each other."""
    masked, choices = threading.Event(), '["yes", "no"]'

    class SlowWorker(RunnerWorker):
        def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
            if plan.grammar_slots:
                assert masked.wait(30), "no mask came while the forward ran"
                masked.clear()
            return super().execute_model(plan)

    core = boot(executor=UniProcExecutor, worker=SlowWorker, grammar=watched(lambda _: masked.set(), choices))
    core.add_request(bound("a", GrammarSpec("choice", choices)))
    [(token_ids, reason, _)] = run(core).values()
    assert reason is FinishReason.STOP
    assert spelled([t for t in token_ids if t not in EOS]) in ("yes", "no")
