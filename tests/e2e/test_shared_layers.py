"""Ranks in processes of their own that share layers, or have some each: what each holds, and that together they answer as one."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.entrypoints.cli.main import main
from pegboard.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pegboard_executor_mp") is None, reason="pegboard-executor-mp is not installed"
)
Open = Callable[..., Any]


def stored(worker: Any) -> list[str]:
    """Digests of the keys and values of each layer."""
    caches = worker.runner.cache.device_caches.values()
    return [hashlib.sha256(cache.contiguous().numpy().tobytes()).hexdigest() for cache in caches]


@pytest.mark.slow
def test_ranks_that_share_a_key_head_store_the_same(tmp_path: Path, open_llm: Open, greedy: Any, random_prompts: Any) -> None:
    """Four ranks, two key heads. There may be fewer cores."""
    key_heads, tp = 2, 4
    folder = make_checkpoint(tmp_path, num_heads=4, num_kv_heads=key_heads)
    prompts, room = random_prompts([3, 40, 17]), {"num_blocks": None, "memory": "4MiB"}
    one, several = open_llm(folder, kv_cache=room), open_llm(folder, kv_cache=room, executor={"tensor_parallel_size": tp})
    wanted, found = (llm.generate(prompts, greedy(30, logprobs=3)) for llm in (one, several))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for our, their in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            values = {token: pytest.approx(entry.logprob, abs=1e-3) for token, entry in their.items()}
            assert {token: entry.logprob for token, entry in our.items()} == values
    specs = several.collective_rpc("get_kv_cache_specs")
    assert {spec.num_kv_heads for of_rank in specs for spec in of_rank.values()} == {1}
    blocks = [llm.engine.info.num_blocks + 1 for llm in (one, several)]  # and the null block
    assert blocks[1] == blocks[0] * key_heads, "as many as fit, of what a rank stores"
    digests = several.collective_rpc(stored)
    for a in range(tp):
        for b in range(a):
            same_head = a * key_heads // tp == b * key_heads // tp
            assert (digests[a] == digests[b]) == same_head, (a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "tp", "pp", "split"), [(10, 1, 4, None), (5, 2, 2, (1, 4))], ids=["ten-by-four", "two-by-two"]
)
def test_stages_answer_alike_whatever_is_aborted(
    layers: int,
    tp: int,
    pp: int,
    split: Any,
    tmp_path: Path,
    open_llm: Open,
    streams: Any,
    greedy: Any,
    random_prompts: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = make_checkpoint(tmp_path, num_layers=layers)
    executor = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "pipeline_split": split}
    caplog.set_level(logging.INFO, logger="pegboard_plugins.worker.worker")  # ranks show as much as this process would
    prompts = random_prompts([3, 20, 40, 7, 60, 1])
    params = [greedy(25)] * 3 + [greedy(25, temperature=1.0, seed=seed) for seed in (1, 2, 3)]

    def run(llm: Any, aborted: dict[int, str]) -> dict[str, list[int]]:
        requests = streams(llm.engine)
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            requests.add(str(number), prompt, one)
        while llm.engine.has_unfinished_requests():
            requests.step()
            if requests.step_number in aborted:
                llm.engine.abort_request(aborted[requests.step_number])
            assert requests.step_number < 1000
        return {name: stream.tokens for name, stream in requests.all.items()}

    wanted = run(open_llm(folder), {})
    llm = open_llm(folder, executor=executor)
    assert run(llm, {}) == wanted
    some = run(llm, {4: "1", 9: "4", 10: "3"})
    assert all(some[name] == wanted[name] for name in "025")
    assert all(0 < len(some[name]) < 25 and some[name] == wanted[name][: len(some[name])] for name in "143")
    ranges = [range(*each) for each in llm.collective_rpc("layer_range")]
    assert [layer for held in ranges[::tp] for layer in held] == list(range(layers)), "none is missing or held twice"
    assert all(ranges[rank] == ranges[rank - rank % tp] for rank in range(tp * pp))
    sizes = [len(held) for held in ranges[::tp]]
    assert split is None or sizes == list(split)
    told = capfd.readouterr().err
    for rank in range(tp * pp):
        assert f"[rank {rank}] INFO" in told
    assert told.count(f"(layers per stage: {', '.join(map(str, sizes))})") == tp * pp


@pytest.mark.parametrize(
    ("options", "setting", "parts"),
    [
        ({"num_heads": 6, "num_kv_heads": 2, "hidden_size": 96}, "4", ["num_attention_heads is 6", "4 ranks", ": 1, 2, 6)"]),
        ({"num_heads": 6, "num_kv_heads": 3, "hidden_size": 96}, "2", ["num_key_value_heads is 3", "2 ranks", ": 1, 3, 6)"]),
        ({"num_kv_heads": 4, "intermediate_size": 130}, "4", ["intermediate_size is 130", "4 ranks", ": 1, 2)"]),
        ({}, "3", ["num_attention_heads is 4", "3 ranks", ": 1, 2, 4)"]),
        ({}, "0", ["'0' is not allowed"]),
        ({}, "-1", ["'-1' is not allowed"]),
        ({}, "two", ["'two' is not allowed"]),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_starts(
    options: dict[str, int],
    setting: str,
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False, **options)

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    size = f"executor.tensor_parallel_size={setting}"
    assert main(["generate", str(folder), "--prompt", "go", "--set", "executor.name=mp", "--set", size]) == 2
    told = capsys.readouterr().err
    for part in ["executor.tensor_parallel_size", *parts]:
        assert part in told
