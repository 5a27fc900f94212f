"""Many requests together: nobody's tokens depend on the others, and nobody waits for a long prompt."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard_plugins.executors.uniproc import UniProcExecutor


@pytest.mark.parametrize(
    ("budget", "neighbours"),
    # a budget of 1 would be used up by one neighbour
    [(1, 0), *((budget, neighbours) for budget in (16, 17, 64, 512) for neighbours in (0, 3))],
)
def test_chunked_prefill_gives_the_tokens_of_one_piece(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, streams: Any, reference: Any, budget: int, neighbours: int
) -> None:
    [prompt, *others] = random_prompts([300, 3, 5, 9][: 1 + neighbours])
    seeded = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)
    scheduler = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 8)}
    engine = open_llm(tiny, scheduler=scheduler, kv_cache={"num_blocks": 400, "allocator": "paged"}).engine
    whole = open_llm(tiny, kv_cache={"num_blocks": 400, "allocator": "paged"})
    for params in (greedy(12), seeded):
        running = streams(engine)
        for i, other in enumerate(others):
            running.add(f"other-{i}", other, greedy(1000))
        while others and not all(s.tokens for s in running.all.values()):
            running.step()
        stream = running.add("long", prompt, params)
        while stream.finish_reason is None:
            running.step()
        engine.abort_all()
        running.run()
        [expected] = whole.generate([prompt], params)
        reference.check_same(prompt, stream.tokens, expected.outputs[0].token_ids)
        assert len(stream.steps) == len(stream.pieces) == 12, "an intermediate chunk was reported"
    assert engine.stats().kv_usage == 0


@pytest.mark.parametrize("budget", [64, 2048])
def test_a_long_prefill_does_not_hold_up_running_requests(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, streams: Any, budget: int
) -> None:
    """Gaps are counted in steps; a step computes at most ``budget`` tokens."""
    engine = open_llm(tiny, scheduler={"max_num_batched_tokens": budget}).engine
    running = streams(engine)
    [short, *longs] = random_prompts([5, 1500, 1500, 1500])
    stream = running.add("a", short, greedy(200))
    while len(stream.tokens) < 10:
        running.step()
    for i, prompt in enumerate(longs):
        running.add(f"b{i}", prompt, greedy(2))
    running.run()
    gaps = [b - a for a, b in zip(stream.steps, stream.steps[1:], strict=False)]
    assert max(gaps) == 1
    assert len(stream.tokens) == 200
    assert all(len(running.all[f"b{i}"].tokens) == 2 for i in range(3))
    first_of_last = running.all["b2"].steps[0] - 10
    assert first_of_last == -(-4500 // (budget - 1)) if budget == 64 else first_of_last <= 5


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_steps_planned_ahead_change_nothing(
    tiny: Any, open_llm: Any, random_prompts: Any, streams: Any, allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real worker gets plans whose tokens are not known yet, in a pool that is too small, with every kind of sampling."""
    rng = random.Random(3)
    prompts = random_prompts([rng.randrange(1, 90) for _ in range(16)], seed=3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20, "ignore_eos": False, "min_tokens": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3},
    ]

    def run(steps_in_flight: int, num_blocks: int) -> Any:
        monkeypatch.setattr(UniProcExecutor, "max_concurrent_batches", steps_in_flight)
        scheduler = {"max_num_seqs": 6, "max_num_batched_tokens": 50}
        llm = open_llm(tiny, scheduler=scheduler, kv_cache={"num_blocks": num_blocks, "block_size": 4, "allocator": allocator})
        running = streams(llm.engine)
        for i, prompt in enumerate(prompts):
            fields = {"seed": i, "max_tokens": (1, 2, 17, 40)[i // 4], "ignore_eos": True, **kinds[i % 4]}
            running.add(str(i), prompt, SamplingParams(**fields))
            running.step()
        running.run()
        assert llm.stats().kv_usage == 0
        return {r: (s.tokens, s.finish_reason, [*map(list, s.logprobs)]) for r, s in running.all.items()}, llm.stats()

    expected, _ = run(1, 400)
    for steps_in_flight in (2, 3):
        found, stats = run(steps_in_flight, 33)
        assert found == expected
        assert stats.num_preemptions > 0


LENGTHS = [1, 2, 600, 15, 16, 17, 300, 31, 32, 33, *range(40, 340, 10)]
TOKENS = 24


@pytest.fixture(scope="module")
def alone(tiny: Any, random_prompts: Any, greedy: Any) -> dict[str, list[int]]:
    """Each prompt by itself."""
    from pegboard import LLM

    prompts = random_prompts(LENGTHS, seed=35)
    with LLM(str(tiny), dtype="float32", kv_cache={"num_blocks": 400}, executor={"num_threads": 1}) as llm:
        return {str(i): llm.generate([p], greedy(TOKENS))[0].outputs[0].token_ids for i, p in enumerate(prompts)}


def test_alone_is_as_the_reference_has_it(alone: Any, reference: Any, random_prompts: Any) -> None:
    for i, prompt in enumerate(random_prompts(LENGTHS, seed=35)):
        reference.check_greedy(prompt, alone[str(i)])


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
@pytest.mark.parametrize("max_num_seqs", [3, 8, 40])
def test_all_at_once(
    tiny: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference: Any, alone: Any, allocator: str, max_num_seqs: int
) -> None:
    llm = open_llm(tiny, scheduler={"max_num_seqs": max_num_seqs}, kv_cache={"num_blocks": 800, "allocator": allocator})
    prompts = random_prompts(LENGTHS, seed=35)
    for i, output in enumerate(llm.generate(prompts, greedy(TOKENS))):
        reference.check_same(prompts[i], output.outputs[0].token_ids, alone[str(i)])


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
@pytest.mark.parametrize("with_aborts", [False, True])
def test_random_arrivals(
    tiny: Any,
    open_llm: Any,
    greedy: Any,
    random_prompts: Any,
    streams: Any,
    reference: Any,
    alone: Any,
    allocator: str,
    with_aborts: bool,
) -> None:
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 100}
    engine = open_llm(tiny, scheduler=scheduler, kv_cache={"num_blocks": 150, "allocator": allocator}).engine
    rng, running = random.Random(1), streams(engine)
    waiting = list(enumerate(random_prompts(LENGTHS, seed=35)))
    rng.shuffle(waiting)
    aborted: set[str] = set()
    while waiting or engine.has_unfinished_requests():
        for i, prompt in (waiting.pop() for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3])))):
            running.add(str(i), prompt, greedy(TOKENS))
        running.step()
        if with_aborts and rng.random() < 0.1:
            victim = rng.choice(list(running.all))
            if running.all[victim].finish_reason is None:
                aborted.add(victim)
                engine.abort_request(victim)
    assert (len(aborted) > 3) == with_aborts
    for rid, stream in running.all.items():
        assert stream.finals == 1
        if rid in aborted:
            assert stream.finish_reason == "abort"
            assert stream.tokens == alone[rid][: len(stream.tokens)]
        else:
            reference.check_same(stream.prompt, stream.tokens, alone[rid])
    assert engine.stats().kv_usage == 0
