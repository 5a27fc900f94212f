"""Random models, splits, settings and requests, which come and are aborted at random steps: several ranks answer as one does."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, RequestOutput, SamplingParams, StructuredOutputs
from pegboard.testing.checkpoints import ARCHITECTURES, make_checkpoint

pytestmark = pytest.mark.slow

Requests = list[tuple[list[int], SamplingParams]]
VOCAB, MAX_LEN = 777, 64


def draw_model(draw: random.Random, folder: Path) -> tuple[int, int, dict[str, Any], int]:
    """Writes a checkpoint. Ranks that share a layer, stages, the section ``executor``, and how many block tables at most."""
    heads, key_heads, tp = draw.choice([(4, 2, 2), (4, 1, 2), (8, 2, 4), (12, 2, 4), (9, 3, 3), (6, 3, 1)])
    num_layers = draw.randrange(2, 6)
    pp = draw.randrange(1 if tp > 1 else 2, min(num_layers, 3) + 1)
    cuts = [0, *sorted(draw.sample(range(1, num_layers), pp - 1)), num_layers]
    split = [end - start for start, end in itertools.pairwise(cuts)]
    architecture = draw.choice(list(ARCHITECTURES))
    make_checkpoint(
        folder,
        architecture,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=8,
        hidden_size=50,
        intermediate_size=48,
        vocab_size=VOCAB,
        tokenizer_size=VOCAB - draw.choice([0, 9]),
        tie_word_embeddings=draw.random() < 0.5,
    )
    return tp, pp, {"pipeline_split": draw.choice([split, None])}, num_layers if "Gemma" in architecture else 1


def draw_settings(draw: random.Random, num_tables: int) -> dict[str, Any]:
    block_size = draw.choice([1, 4, 16])
    enough = num_tables * -(-MAX_LEN // block_size) + 1
    return {
        "max_model_len": MAX_LEN,
        "seed": draw.choice([None, 5]),
        "kv_cache": {"block_size": block_size, "num_blocks": draw.choice([1, 2, 6]) * enough, "allocator": "auto"},
        "scheduler": {"max_num_seqs": draw.choice([2, 4, 16]), "max_num_batched_tokens": draw.choice([3, 16, 512])},
    }


def draw_requests(draw: random.Random, count: int) -> Requests:
    prefixes = [[draw.randrange(4, 700) for _ in range(draw.randrange(5, 30))] for _ in range(2)]
    found = []
    for _ in range(count):
        params: dict[str, Any] = {"max_tokens": draw.randrange(1, 20), "ignore_eos": draw.random() < 0.7, "temperature": 0.0}
        if draw.random() < 0.6:
            params |= {"temperature": draw.choice([0.7, 1.5]), "seed": draw.randrange(99), "n": draw.choice([1, 1, 3])}
            params |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.02}])
        params |= draw.choice([{}, {}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.3}])
        if draw.random() < 0.2:
            regex = StructuredOutputs(regex=r"[a-f]{3,9}( [0-9]{2}){1,3}")
            params |= {"structured_outputs": regex, "max_tokens": 30, "ignore_eos": False}
        prompt = draw.choice([[], *prefixes]) + [draw.randrange(4, 700) for _ in range(draw.randrange(1, 20))]
        found.append((prompt[: MAX_LEN - params["max_tokens"]], SamplingParams(**params)))
    return found


def shown(output: RequestOutput) -> tuple[list[Any], list[float]]:
    answers = [(answer.index, list(answer.token_ids), answer.finish_reason) for answer in output.outputs]
    entries = [entry for each in (output.prompt_logprobs, *(a.logprobs for a in output.outputs)) for entry in each or () if entry]
    return answers, [float(value.logprob) for entry in entries for _, value in sorted(entry.items())]


def drive(llm: LLM, requests: Requests, begins: list[int], ends: dict[int, int]) -> dict[int, Any]:
    """``begins``: step at which each request comes; ``ends``: at which some are aborted. What the others were answered."""
    engine, found = llm.engine, {}
    for step in range(3000):
        for number in (i for i, begin in enumerate(begins) if begin == step):
            prompt, params = requests[number]
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for number in (i for i, end in ends.items() if end == step):
            engine.abort_request(str(number))
        found |= {int(output.request_id): shown(output) for output in engine.step() if output.finished}
        if step > max(begins) and not engine.has_unfinished_requests():
            return {number: answer for number, answer in found.items() if number not in ends}
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_one_rank(open_llm: Any, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tp, pp, executor, num_tables = draw_model(draw, tmp_path)
    settings, requests = draw_settings(draw, num_tables), draw_requests(draw, 10)
    begins = [draw.choice([0, draw.randrange(25)]) for _ in requests]
    ends = {i: begins[i] + draw.randrange(12) for i in range(len(requests)) if draw.random() < 0.25}
    one = open_llm(tmp_path, **settings)
    wanted = {i: shown(one.generate([{"prompt_token_ids": p}], params)[0]) for i, (p, params) in enumerate(requests)}
    several = open_llm(tmp_path, tp, pp, executor=executor, **settings)
    for _ in range(2):  # the second time with what is cached
        found = drive(several, requests, begins, ends)
        assert found.keys() == wanted.keys() - ends.keys()
        for number, (answers, logprobs) in found.items():
            assert answers == wanted[number][0], (number, requests[number])
            assert logprobs == pytest.approx(wanted[number][1], abs=1e-3)
        assert several.stats().kv_usage == 0
