"""Logits processors: examples, broken ones that the conformance tests must catch, and the worker that feeds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from pegboard.contracts.logits_processor import AddedRequest, BatchDelta, LogitsProcessor
from pegboard.engine.bootstrap import prepare
from pegboard.plugins import LogitsProcessorProvider, hookimpl
from pegboard.testing.conformance.logits_processor import LogitsProcessorConformance
from pegboard.testing.plan_driver import GREEDY, PlanDriver
from pegboard.testing.scripted_model import ScriptedPlugin
from pegboard.wire import KVCacheConfig, KVCacheGroup, SamplingParams, World
from pegboard_plugins.worker.worker import StandardWorker


class ByRow(LogitsProcessor):
    """Keeps what was added in each row."""

    def __init__(self) -> None:
        self.rows: dict[int, AddedRequest] = {}

    def update_state(self, delta: BatchDelta | None) -> None:
        if delta is None:
            return
        for row in delta.removed:
            self.rows.pop(row, None)
        for source, target in delta.moved:
            self.rows[target] = self.rows.pop(source)
        for added in delta.added:
            self.rows[added.row] = added

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        for i, row in enumerate(rows):
            self.change(logits[i], self.rows[row])
        return logits

    def change(self, logits: torch.Tensor, request: AddedRequest) -> None:
        """One row, in place."""


class NoRepeat(ByRow):
    """No token twice in a row."""

    def change(self, logits: torch.Tensor, request: AddedRequest) -> None:
        if request.output_token_ids:
            logits[request.output_token_ids[-1]] = float("-inf")


class Favour(ByRow):
    """Adds to one logit what the request's fields say; requests without fields are no concern."""

    def concerns(self, rows: Sequence[int]) -> Sequence[int]:
        return [row for row in rows if "favour" in self.rows[row].ext]

    def change(self, logits: torch.Tensor, request: AddedRequest) -> None:
        logits[request.ext["favour"]["token"]] += 100.0  # type: ignore[index]


class Flatten(ByRow):
    """Brings logits nearer to the highest, more so the longer the output; not in place."""

    argmax_invariant = True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        lengths = torch.tensor([float(len(self.rows[row].output_token_ids)) for row in rows])
        highest = logits.amax(dim=1, keepdim=True)
        return highest + (logits - highest) / (1.0 + lengths[:, None])


class TestNoRepeat(LogitsProcessorConformance):
    def make(self) -> LogitsProcessor:
        return NoRepeat()


class TestFavour(LogitsProcessorConformance):
    def make(self) -> LogitsProcessor:
        return Favour()

    def ext(self, index: int) -> dict[str, object]:
        return {"favour": {"token": index % self.vocab_size}} if index % 3 else {}


class TestFlatten(LogitsProcessorConformance):
    def make(self) -> LogitsProcessor:
        return Flatten()


# -- broken ones -------------------------------------------------------------------------------------------------------


class CountsSteps(ByRow):
    """Its state follows from how often it was applied."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        self.steps += 1
        return logits + torch.arange(logits.shape[1]) * self.steps


class LooksAtNeighbours(ByRow):
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return logits - logits.mean(dim=0)


class CopiesTheOutput(ByRow):
    def update_state(self, delta: BatchDelta | None) -> None:
        super().update_state(delta)
        for added in delta.added if delta else ():
            self.rows[added.row] = AddedRequest(added.row, "", added.params, [], list(added.output_token_ids), {})

    change = NoRepeat.change


class StartsAnewOnReturn(ByRow):
    """Takes the output at its entry for part of the prompt."""

    def update_state(self, delta: BatchDelta | None) -> None:
        super().update_state(delta)
        for added in delta.added if delta else ():
            self.starts[added.row] = len(added.output_token_ids)

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[int, int] = {}

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        for i, row in enumerate(rows):
            logits[i, len(self.rows[row].output_token_ids) - self.starts[row]] = 50.0
        return logits


class NeverForgets(ByRow):
    """Adds up over all requests that a row ever had."""

    def __init__(self) -> None:
        super().__init__()
        self.total: dict[int, int] = {}

    def update_state(self, delta: BatchDelta | None) -> None:
        super().update_state(delta)
        for added in delta.added if delta else ():
            self.total[added.row] = self.total.get(added.row, 0) + len(added.prompt_token_ids)

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        for i, row in enumerate(rows):
            logits[i, self.total.get(row, 0) % logits.shape[1]] += 1.0
        return logits


class NamesAllRows(NoRepeat):
    def concerns(self, rows: Sequence[int]) -> Sequence[int]:
        return list(self.rows)


class ClaimsTooMuch(NoRepeat):
    argmax_invariant = True


class TakesListsForGranted(ByRow):
    def change(self, logits: torch.Tensor, request: AddedRequest) -> None:
        known: list[int] = request.prompt_token_ids + request.output_token_ids  # type: ignore[operator]
        logits[known] -= 1.0


class Cuts(ByRow):
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return logits[:, :-1]


class DoesNothing(ByRow):
    pass


@pytest.mark.parametrize("broken", [
    CountsSteps, LooksAtNeighbours, CopiesTheOutput, StartsAnewOnReturn, NeverForgets, NamesAllRows, ClaimsTooMuch,
    TakesListsForGranted, Cuts, DoesNothing,
])  # fmt: skip
def test_conformance_catches_broken_processors(broken: type[LogitsProcessor]) -> None:
    class Case(LogitsProcessorConformance):
        def make(self) -> LogitsProcessor:
            return broken()

    failed = []
    for name in (name for name in dir(Case) if name.startswith("test_")):
        try:
            getattr(Case(), name)()
        except pytest.skip.Exception:
            continue
        except Exception:
            failed.append(name)
    assert failed


# -- the worker --------------------------------------------------------------------------------------------------------


Boot = Callable[..., tuple[StandardWorker, PlanDriver]]
"""A worker with these processors, and a driver for it."""


class Recorder(ByRow):
    """Notes deltas; ``fail``: the method that raises."""

    fail = ""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[list[int], list[int]] | None] = []
        self.outputs: list[dict[int, list[int]]] = []

    def update_state(self, delta: BatchDelta | None) -> None:
        super().update_state(delta)
        self.told.append(None if delta is None else (list(delta.removed), [added.row for added in delta.added]))
        self._act("update_state")

    def concerns(self, rows: Sequence[int]) -> Sequence[int]:
        self._act("concerns")
        return [99] if self.fail == "other rows" else rows

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        self._act("apply")
        self.outputs.append({row: list(self.rows[row].output_token_ids) for row in rows})
        return {"shape": logits[:, 1:], "type": None}.get(self.fail, logits)  # type: ignore[return-value]

    def _act(self, method: str) -> None:
        if self.fail == method:
            raise KeyError("odd-17")


class ProcessorPlugin(ScriptedPlugin):
    @hookimpl
    def logits_processors(self) -> Any:
        for target in (Recorder, NoRepeat, Favour):
            yield LogitsProcessorProvider(name=target.__name__.lower(), target=target)


@pytest.fixture
def boot() -> Iterator[Boot]:
    made: list[StandardWorker] = []

    def make(*processors: str) -> tuple[StandardWorker, PlanDriver]:
        worker: StandardWorker = prepare(
            model="scripted",
            plugins={"scripted": (ProcessorPlugin if processors else ScriptedPlugin)(max_model_len=64)},
            executor={"num_threads": 1},
            scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 32},
            sampling={"logits_processors": processors},
        ).composition.create("worker", world=World())
        worker.init_device()
        worker.load_model()
        specs = worker.get_kv_cache_specs()
        group = KVCacheGroup(layers=list(specs), spec=next(iter(specs.values())))
        worker.initialize_cache(KVCacheConfig(num_blocks=40, groups=[group]))
        made.append(worker)
        return worker, PlanDriver(worker.execute_model, num_slots=4, block_size=16, num_blocks=40)

    yield make
    for worker in made:
        worker.shutdown()


def inner(worker: StandardWorker, index: int = 0) -> Any:
    return worker.runner._processors.active[index].inner  # type: ignore[attr-defined]


def test_the_worker_tells_once_per_step_what_changed(boot: Boot) -> None:
    worker, driver = boot("recorder")
    recorder = inner(worker)
    driver.add("a", [1, 2, 3, 4, 5], SamplingParams(temperature=1.0, seed=4, max_tokens=None))
    driver.step({"a": 2})  # samples nothing
    slot = driver.requests["a"].slot
    assert recorder.told == [([], [slot])]
    assert list(recorder.rows[slot].prompt_token_ids) == [1, 2, 3, 4, 5]
    assert recorder.rows[slot].params == driver.requests["a"].sampling
    assert recorder.rows[slot].request_id == "a"
    for count in (3, 1, 1):
        driver.step({"a": count})
    assert recorder.told[1:] == [None, None, None]
    output = driver.requests["a"].output
    assert recorder.outputs == [{slot: []}, {slot: output[:1]}, {slot: output[:2]}]
    driver.preempt("a")
    driver.step({"a": 4})  # leaves and comes back, samples nothing
    back = driver.requests["a"].slot
    assert recorder.told[4:] == [([slot], [back])]
    assert list(recorder.rows[back].prompt_token_ids) == [1, 2, 3, 4, 5], "without the output"
    driver.step({"a": 4})
    assert recorder.outputs[3:] == [{back: output[:3]}]
    driver.finish("a")
    worker.execute_model(driver.plan({}))
    worker.execute_model(driver.plan({}))
    assert recorder.told[5:] == [None, ([back], []), None]


def test_views_read_like_lists(boot: Boot) -> None:
    worker, driver = boot("recorder")
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    view = inner(worker).rows[driver.requests["a"].slot].output_token_ids
    driver.generate(5)
    output = driver.requests["a"].output
    assert list(view) == output == view
    assert (len(view), view[-1], view[1:3], view[::-1]) == (5, output[-1], output[1:3], output[::-1])
    assert type(view[0]) is type(view[:1][0]) is int
    assert repr(view) == repr(output)
    assert output[2] in view
    assert view != "text"
    with pytest.raises(IndexError):
        view[5]


def test_processors_act_in_their_order_and_on_their_rows(boot: Boot) -> None:
    _, plain_driver = boot()
    worker, driver = boot("favour", "norepeat")
    for each in (plain_driver, driver):
        for name in ("plain", "favoured"):
            each.add(name, [1, 2, 3])
    unprocessed = plain_driver.generate(4)["plain"]
    assert len(set(unprocessed)) == 4
    plan = driver.plan({"plain": 3, "favoured": 3})
    plan.new_requests[1].ext = {"favour": {"token": 200}}
    driver.book({"plain": 3, "favoured": 3}, worker.execute_model(plan))  # type: ignore[arg-type]
    found = driver.generate(4)
    assert found["plain"] == unprocessed
    assert found["favoured"][0] == found["favoured"][2] == 200, "favoured, except where that would repeat"
    assert 200 not in found["favoured"][1::2]


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("update_state", "logits processor 'recorder' failed in update_state: KeyError: 'odd-17'"),
        ("concerns", "logits processor 'recorder' failed in concerns: KeyError: 'odd-17'"),
        ("apply", "logits processor 'recorder' failed in apply: KeyError: 'odd-17'"),
        ("other rows", r"failed in concerns: ValueError: it names rows \[99\]"),
        ("shape", r"failed in apply: ValueError: it must return logits of the shape \[1, 257\], and returned \[1, 256\]"),
        ("type", r"returned NoneType"),
    ],
)
def test_a_processor_that_fails_is_named(boot: Boot, fail: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, driver = boot("norepeat", "recorder")
    monkeypatch.setattr(Recorder, "fail", fail)
    driver.add("a", [1, 2, 3], GREEDY)
    with pytest.raises(RuntimeError, match=message):
        driver.step({"a": 3})


def test_without_processors_nothing_is_kept(boot: Boot) -> None:
    worker, driver = boot()
    driver.add("a", [1, 2, 3])
    driver.generate(2)
    assert worker.runner._processors.active == ()
