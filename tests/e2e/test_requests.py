"""The life of a request with real parts: aborts in every phase, ids, limits, empty prompts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pegboard import LLM, EngineConfig, LLMEngine, SamplingParams
from pegboard.contracts.scheduler import RequestStatus
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.scripted_model import ScriptedPlugin, text_model


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_aborts_in_every_phase_leave_nothing_behind(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, streams: Any, allocator: str
) -> None:
    llm = open_llm(
        tiny,
        scheduler={"max_num_batched_tokens": 48, "max_num_seqs": 6},
        kv_cache={"num_blocks": 40, "allocator": allocator},
    )
    engine, rng = llm.engine, random.Random(0)
    [big] = random_prompts([40 * 16 - 3], seed=9)
    phases = set()
    for _ in range(20):
        running = streams(engine)
        for i, prompt in enumerate(random_prompts([rng.randrange(1, 200) for _ in range(20)], seed=rng.randrange(1000))):
            running.add(str(i), prompt, greedy(rng.choice([1, 2, 5, 30])))
        for _ in range(rng.randrange(12)):
            running.step()
        unfinished = [r for r, s in running.all.items() if s.finish_reason is None]
        requests = engine.client.core.scheduler.state.requests  # type: ignore[attr-defined]
        phases |= {_phase(requests[i]) for r in unfinished for i in engine.core_ids(r)}
        engine.abort_request([*unfinished, "unknown"])
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
        running.run()
        assert [s.finals for s in running.all.values()] == [1] * 20
        assert {running.all[r].finish_reason for r in unfinished} <= {"abort"}
        engine.abort_request(unfinished)
        assert len(llm.generate([big], greedy(3))[0].outputs[0].token_ids) == 3
    assert phases == {"waiting", "between chunks", "decoding", "before its last token"}
    engine.client.core.scheduler.check_integrity()  # type: ignore[attr-defined]


def _phase(request: Any) -> str:
    length = len(request.token_ids)
    if request.status is not RequestStatus.RUNNING:
        return "waiting"
    if request.num_computed < length - 1:
        return "between chunks"
    return "before its last token" if length == request.max_len - 1 else "decoding"


def test_a_second_request_of_the_same_id_is_refused(tiny: Any, open_llm: Any, greedy: Any, streams: Any) -> None:
    engine = open_llm(tiny).engine
    running = streams(engine)
    stream = running.add("x", [5, 6, 7], greedy(10))
    running.step()
    with pytest.raises(ValueError, match="'x' is still in use"):
        engine.add_request("x", [8, 9], greedy(10))
    running.run()
    assert len(stream.tokens) == 10


def test_an_id_can_be_used_again_right_after_an_abort(tiny: Any, open_llm: Any, greedy: Any, streams: Any) -> None:
    engine = open_llm(tiny).engine
    expected = None
    for _ in range(200):
        running = streams(engine)
        running.add("x", [5, 6, 7], greedy(20))
        while not running.all["x"].tokens:
            running.step()
        engine.abort_request("x")
        engine.step()
        stream = running.add("x", [9, 8, 7], greedy(4))
        running.run()
        expected = expected or stream.tokens
        assert (stream.tokens, stream.finals, stream.finish_reason) == (expected, 1, "length")
    assert engine.stats().kv_usage == 0


@pytest.mark.parametrize("length", [126, 127, 128, 129])
def test_edges_of_the_context(tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, length: int) -> None:
    llm = open_llm(tiny, max_model_len=128)
    [prompt] = random_prompts([length])
    for max_tokens in (1, 2, 5, None):
        if length + (max_tokens or 1) > 128:
            with pytest.raises(ValueError, match=rf"{length} tokens.*max_model_len=128"):
                llm.generate([prompt], greedy(max_tokens))
            continue
        [output] = llm.generate([prompt], greedy(max_tokens))
        assert len(output.outputs[0].token_ids) == (max_tokens or 128 - length)
        assert output.outputs[0].finish_reason == "length"


def test_a_context_longer_than_the_model_s_is_refused(tiny: Any, open_llm: Any) -> None:
    with pytest.raises(ValueError, match=r"max_model_len.*2048"):
        open_llm(tiny, max_model_len=4096)


def test_empty_prompts_fail_alone(tiny: Any, open_llm: Any, greedy: Any, streams: Any, tmp_path: Any) -> None:
    llm = open_llm(tiny)
    running = streams(llm.engine)
    stream = running.add("neighbour", [5, 6, 7], greedy(10))
    running.step()
    for bad in ("", [], {"prompt": ""}, {"prompt_token_ids": []}, {"messages": []}):
        with pytest.raises(ValueError, match="empty"):
            llm.engine.add_request("bad", bad, greedy(1))
    running.run()
    assert len(stream.tokens) == 10
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt is empty"):
        llm.generate(["a", "", "b"], greedy(1))
    with pytest.raises(ValueError, match=r"prompts\[0\]: prompt is empty"):
        llm.generate("", greedy(1))
    assert llm.generate([], greedy(1)) == []
    [output] = llm.chat([{"role": "user", "content": ""}], greedy(2))
    assert len(output.outputs[0].token_ids) == 2
    with_bos = open_llm(make_checkpoint(tmp_path / "bos", bos=True))
    [output] = with_bos.generate("", greedy(2))
    assert (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) == (1, 2)


@pytest.mark.parametrize("bad", [-1, 1000, 2000, 2**31, 2**63, 1.5, "x", True])
def test_bad_token_ids_harm_nobody(tiny: Any, open_llm: Any, greedy: Any, streams: Any, bad: Any) -> None:
    engine = open_llm(tiny).engine
    running = streams(engine)
    stream = running.add("neighbour", [5, 6, 7], greedy(6))
    running.step()
    with pytest.raises(ValueError, match=r"prompt_token_ids\[1\]"):
        engine.add_request("bad", [5, bad], greedy(1))
    with pytest.raises(ValueError, match="stop_token_ids"):
        engine.add_request("bad", [5], SamplingParams(stop_token_ids=(bad,)))
    running.run()
    assert len(stream.tokens) == 6


def test_values_at_the_edge_of_their_range_harm_nobody(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, streams: Any
) -> None:
    running = streams(open_llm(tiny).engine)
    stream = running.add("neighbour", [5, 6, 7], greedy(12))
    running.step()
    [prompt] = random_prompts([40])
    odd: list[dict[str, Any]] = [
        {"top_k": 2**31 - 1}, {"top_p": 1e-60}, {"temperature": 1e6}, {"temperature": 1.01e-4}, {"seed": -(2**63)},
        {"seed": 2**64 - 1}, {"repetition_penalty": 1e-3}, {"min_p": 1.0}, {"frequency_penalty": -2.0}, {"min_tokens": 5},
    ]  # fmt: skip
    for i, fields in enumerate(odd):
        running.add(str(i), prompt, SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **fields}))
    running.add("\ud800", prompt, greedy(5), cache_salt="\ud801")
    running.run()
    assert {len(s.tokens) for r, s in running.all.items() if r != "neighbour"} == {5}
    assert len(stream.tokens) == 12


def test_every_token_is_streamed_and_the_text_is_that_of_all_tokens(
    tiny: Any, open_llm: Any, random_prompts: Any, streams: Any
) -> None:
    llm = open_llm(tiny)
    running = streams(llm.engine)
    for i, prompt in enumerate(random_prompts([5, 30, 90])):
        running.add(str(i), prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=100))
    running.run()
    for stream in running.all.values():
        ended = stream.finish_reason == "stop"
        assert stream.text == llm.get_tokenizer().decode(stream.tokens[:-1] if ended else stream.tokens)


def test_a_scripted_model_speaks_through_the_whole_engine() -> None:
    """The kit for exact outputs: a text per prompt, multi-byte characters included, through the real worker and scheduler."""
    script = {"Hi": " there", "Emoji?": " \U0001f642 d\u00e9j\u00e0 \uc548\ub155"}
    with LLM("scripted", plugins={"scripted": ScriptedPlugin(text_model(script))}, max_num_seqs=2) as llm:
        outputs = llm.generate(list(script), SamplingParams(temperature=0.0, max_tokens=64))
    assert [o.text for o in outputs] == list(script.values())
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}


def test_an_engine_from_a_finished_configuration(tiny: Any, greedy: Any) -> None:
    config = EngineConfig(model=str(tiny), dtype="float32", kv_cache={"num_blocks": 50})
    with LLMEngine.from_config(config) as engine, LLM(str(tiny), dtype="float32", kv_cache={"num_blocks": 50}) as llm:
        engine.add_request("a", [5, 6, 7], greedy(6))
        ended = []
        while engine.has_unfinished_requests():
            ended += [output for output in engine.step() if output.finished]
        [expected] = llm.generate([[5, 6, 7]], greedy(6))
        assert [o.outputs[0].token_ids for o in ended] == [expected.outputs[0].token_ids]
