"""Whole engines with graphs answer as without: padding, sizes, chunks, sleep, ranks; and reasons where there are none."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams, StructuredOutputs
from pegboard.contracts.worker import WorkerExtension
from pegboard.plugins import WorkerExtensionProvider, hookimpl
from pegboard.testing.checkpoints import make_checkpoint
from pegboard_plugins.graphs.runner import DecodeGraphRunner
from pegboard_plugins.worker import memory
from pegboard_plugins.worker.links import Links

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (3, 20, 1, 9, 33, 14, 2, 7, 5, 11)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(4, 1000) for _ in range(length)] for length in lengths]


def answers(llm: LLM, lengths: tuple[int, ...] = LENGTHS, params: Any = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(*lengths), params)]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """Of the usual device and attention, without graphs."""
    with LLM(str(folder), dtype="float32", executor={"num_threads": 1}, kv_cache={"num_blocks": 100, "block_size": 8}) as llm:
        assert "platform 'cpu' has no graphs" in llm.collective_rpc("graph_report")[0]["off"]
        return answers(llm)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every step that a graph has run."""
    seen: list[int] = []
    run = DecodeGraphRunner.run

    def counted(self: DecodeGraphRunner, inputs: Any) -> Any:
        seen.append(inputs.attention[0].num_rows)
        return run(self, inputs)

    monkeypatch.setattr(DecodeGraphRunner, "run", counted)
    return seen


def test_answers_are_those_without_graphs(open_llm: Any, wanted: list[list[int]], replayed: list[int]) -> None:
    llm = open_llm()
    assert llm.collective_rpc("graph_report")[0]["sizes"] == (1, 2, 4, 8)
    assert answers(llm) == wanted
    assert {8, 2} <= set(replayed), "ten requests, eight at once"
    lengths = list(range(1, 8))
    staggered = [SamplingParams(temperature=0.0, max_tokens=4 + 2 * n, ignore_eos=True) for n in lengths]
    with_graphs = answers(llm, LENGTHS[:7], staggered)
    assert set(range(1, 8)) <= set(replayed), "every number of rows, most of them padded"
    eager = open_llm(compilation={"enforce_eager": True})
    assert answers(eager, LENGTHS[:7], staggered) == with_graphs


def test_steps_with_prompts_and_large_ones_are_not_replayed(open_llm: Any, wanted: list[list[int]], replayed: list[int]) -> None:
    llm = open_llm(compilation={"capture_sizes": [4, 2]}, scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 16})
    assert llm.collective_rpc("graph_report")[0]["sizes"] == (2, 4)
    assert answers(llm) == wanted
    assert replayed
    assert max(replayed) <= 4


def test_everything_that_reads_hidden_states_still_works(open_llm: Any, replayed: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1, n=2)
    shown = []
    for settings in ({}, {"compilation": {"enforce_eager": True}}):
        before = len(replayed)
        outputs = open_llm(**settings).generate(prompts(5, 9, 3), params)
        assert bool(replayed[before:]) == (not settings)
        entries = [
            entry for o in outputs for a in o.outputs for entry in (*(o.prompt_logprobs or ()), *(a.logprobs or ())) if entry
        ]
        shown.append([(token, value.logprob) for entry in entries for token, value in sorted(entry.items())])
    assert [token for token, _ in shown[0]] == [token for token, _ in shown[1]]
    assert [v for _, v in shown[0]] == pytest.approx([v for _, v in shown[1]], abs=1e-4)


def test_graphs_are_dropped_for_sleep_and_captured_on_waking(open_llm: Any, wanted: list[list[int]], replayed: list[int]) -> None:
    llm = open_llm()
    for level, steps in ((1, [None]), (2, [None]), (2, [["weights"], ["kv_cache"]])):
        llm.collective_rpc("sleep", (level,))
        assert llm.collective_rpc("graph_report")[0]["off"] == ("nothing has been captured",)
        for tags in steps:
            llm.collective_rpc("wake_up", (tags,))
        assert llm.collective_rpc("graph_report")[0]["sizes"] == (1, 2, 4, 8)
        llm.reset_prefix_cache()
        before = len(replayed)
        assert answers(llm) == wanted
        assert len(replayed) > before


def test_stages_replay_their_part(open_llm: Any, wanted: list[list[int]], replayed: list[int]) -> None:
    llm = open_llm(pp=2)
    assert [r["sizes"] for r in llm.collective_rpc("graph_report")] == [(1, 2, 4, 8)] * 2
    assert answers(llm) == wanted
    assert replayed


def test_ranks_that_share_layers_replay_together(open_llm: Any, wanted: list[list[int]], replayed: list[int]) -> None:
    llm = open_llm(tp=2, pp=2, executor={"communicator": "capturable"})
    assert [r["sizes"] for r in llm.collective_rpc("graph_report")] == [(1, 2, 4, 8)] * 4
    assert answers(llm) == wanted
    assert replayed
    found = open_llm(tp=2).collective_rpc("graph_report")
    assert all("ThreadCommunicator, over which ranks share layers, cannot be captured" in r["off"][0] for r in found)


KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 0.8, "seed": 3, "n": 2},
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.3},
    {"logit_bias": {7: 3.0}},
    {"structured_outputs": StructuredOutputs(regex="[ab ]{1,6}"), "ignore_eos": False},
]


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": {"max_num_seqs": 1}},
        {"scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 10}, "max_model_len": 70},
        {"kv_cache": {"num_blocks": 20, "block_size": 8}, "compilation": {"capture_sizes": [3, 8, 3, 5]}},
        {"pp": 2, "kv_cache": {"num_blocks": 20, "block_size": 8}},
    ],
    ids=["one at a time", "chunks", "preempted", "preempted, stages"],
)
def test_requests_of_all_kinds_are_answered_as_without(open_llm: Any, replayed: list[int], settings: dict[str, Any]) -> None:
    draw = random.Random(1)
    lengths = tuple(draw.choice([1, 2, 9, 20, 40]) for _ in range(14))
    given = [{"temperature": 0.0, "max_tokens": draw.randrange(1, 25), "ignore_eos": True} for _ in lengths]
    params = [SamplingParams(**{**each, **KINDS[i % len(KINDS)]}) for i, each in enumerate(given)]
    found = []
    for eager in (True, False):
        own = {**settings, "compilation": {"enforce_eager": True}} if eager else settings
        outputs = open_llm(**own).generate(prompts(*lengths), params)
        found.append([[list(answer.token_ids) for answer in output.outputs] for output in outputs])
        assert bool(replayed) != eager
    assert found[0] == found[1]


class Inside(WorkerExtension):
    capturable = False


class Extensions:
    @hookimpl
    def worker_extensions(self) -> Any:
        yield WorkerExtensionProvider(name="inside", target=Inside)


def test_every_reason_is_told(open_llm: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    longrope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = make_checkpoint(tmp_path, config_overrides={"rope_parameters": longrope, "max_position_embeddings": 64})
    caplog.set_level(logging.INFO, logger="pegboard_plugins.graphs")
    llm = open_llm(
        model=folder,
        attention="torch",
        compilation={"enforce_eager": True, "capture_sizes": []},
        plugins={"inside": Extensions(), "enabled": ["inside"]},
    )
    off = llm.collective_rpc("graph_report")[0]["off"]
    assert [reason.split(" (")[0] for reason in off] == [
        "compilation.enforce_eager is true",
        "compilation.capture_sizes has nothing up to the 8 rows that a step may have",
        "attention backend 'torch' cannot be captured",
        "LlamaForCausalLM does not say that its forward can be captured",
        "worker extension 'inside' looks inside of forward",
    ]
    assert f"no graphs: {'; '.join(off)}" in caplog.text


def test_what_graphs_take_is_kept_from_the_cache(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    booked: list[int] = []
    budget = memory.kv_budget
    monkeypatch.setattr(memory, "kv_budget", lambda *args: booked.append(args[-1]) or budget(*args))
    for eager in (False, True):
        llm = open_llm(kv_cache={"block_size": 8}, compilation={"enforce_eager": eager})
        report = llm.collective_rpc("determine_available_memory")[0]
        assert (report.graphs == 0) == eager
        assert booked == [report.graphs] * 2
        booked.clear()


def test_a_capture_that_fails_names_the_remedy(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pegboard_plugins.layers.norm import RMSNorm

    forward = RMSNorm.forward

    def waiting(self: RMSNorm, x: Any) -> Any:
        return forward(self, x) if x.abs().max().item() < 1e9 else x

    monkeypatch.setattr(RMSNorm, "forward", waiting)
    with pytest.raises(
        Exception, match=r"a graph of 8 rows could not be captured: .*compilation.enforce_eager=true does without"
    ):
        open_llm()


def test_groups_of_layers_are_refilled_each(open_llm: Any, tmp_path: Path, replayed: list[int]) -> None:
    """Layers with a window and without, past several windows."""
    folder = make_checkpoint(tmp_path, "Gemma3ForCausalLM", num_layers=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    found = []
    for eager in (True, False):
        llm = open_llm(model=folder, compilation={"enforce_eager": eager})
        assert llm.collective_rpc(lambda worker: len(worker.runner.groups)) == [2]
        found.append(answers(llm, LENGTHS[:4], params))
        assert bool(replayed) != eager
    assert found[0] == found[1]


def test_graphs_go_before_ranks_part(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator whose operations are in graphs cannot close."""
    events: list[str] = []
    drop, close = DecodeGraphRunner.drop, Links.close
    monkeypatch.setattr(DecodeGraphRunner, "drop", lambda self: events.append(f"drop {len(self.report.sizes)}") or drop(self))
    monkeypatch.setattr(Links, "close", lambda self: events.append("close") or close(self))
    llm = open_llm()
    events.clear()
    llm.shutdown()
    assert events == ["drop 4", "close"]
