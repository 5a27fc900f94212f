"""Everything that a request may ask for, answered by several ranks as by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import LLM, RequestOutput, SamplingParams, StructuredOutputs
from pegboard.contracts.logits_processor import BatchDelta, LogitsProcessor
from pegboard.plugins import LogitsProcessorProvider, hookimpl
from pegboard.testing.checkpoints import make_checkpoint

WORLDS = [(2, 1), (1, 2), (2, 2)]


class NoRepeat(LogitsProcessor):
    """Forbids the token before, which it has to see: the outputs of all requests."""

    def __init__(self) -> None:
        self.outputs: dict[int, Sequence[int]] = {}

    @property
    def argmax_invariant(self) -> bool:
        return False

    def update_state(self, delta: BatchDelta | None) -> None:
        for row in delta.removed if delta is not None else ():
            self.outputs.pop(row, None)
        for request in delta.added if delta is not None else ():
            self.outputs[request.row] = request.output_token_ids

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        for i, row in enumerate(rows):
            if self.outputs[row]:
                logits[i, self.outputs[row][-1]] = float("-inf")
        return logits


class Processors:
    @hookimpl
    def logits_processors(self) -> Any:
        yield LogitsProcessorProvider(name="no_repeat", target=NoRepeat)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer knows fewer ids than it has rows, and two ranks have to pad these."""
    return make_checkpoint(tmp_path_factory.mktemp("features"), num_layers=3, vocab_size=1005, tokenizer_size=990, bos=False)


@dataclass
class Answers:
    """Of several requests: ids and ends of each answer, and all log probabilities in one list."""

    tokens: list[list[tuple[list[int], str | None]]]
    logprobs: list[float]

    def check(self, wanted: Answers) -> None:
        assert self.tokens == wanted.tokens
        assert self.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


def some_prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(4, 990) for _ in range(length)] for length in lengths]


def shown(outputs: list[RequestOutput]) -> Answers:
    tokens = [[(list(answer.token_ids), answer.finish_reason) for answer in output.outputs] for output in outputs]
    found: list[Any] = []
    for output in outputs:
        for entries in (output.prompt_logprobs, *(answer.logprobs for answer in output.outputs)):
            found += [entry for entry in entries or () if entry is not None]
    return Answers(tokens, [float(value.logprob) for entry in found for _, value in sorted(entry.items())])


def requests() -> tuple[list[Any], list[SamplingParams]]:
    fixed: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    seeded = {**fixed, "temperature": 1.3, "seed": 7}
    choice = StructuredOutputs(regex=r"[a-f]{3,9}( [0-9]{2}){1,3}")
    params = [
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, **fixed),
        SamplingParams(n=4, **seeded, logprobs=2),
        SamplingParams(n=3, prompt_logprobs=0, **seeded),
        SamplingParams(top_k=5, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, **seeded),
        SamplingParams(min_p=0.02, top_p=0.9, logit_bias={17: 4.0, 400: -5.0}, **seeded),
        SamplingParams(allowed_token_ids=[30, 500, 980], **seeded),
        SamplingParams(bad_words=["a", " the"], min_tokens=9, **{**seeded, "ignore_eos": False}),
        SamplingParams(structured_outputs=choice, temperature=1.0, seed=3, max_tokens=60),
        SamplingParams(n=3, structured_outputs=choice, temperature=1.0, seed=4, max_tokens=60, prompt_logprobs=1),
        SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(choice=["yes", "no"]), max_tokens=9),
    ]
    return some_prompts(40, 9, 17, 3, 25, 8, 1, 12, 16, 5), params


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, Answers]:
    """By what kind of engine; one rank's answers."""
    found = {}
    for kind, settings in SETTINGS.items():
        plugins = {"processors": Processors()} if kind == "processor" else {}
        with LLM(str(folder), dtype="float32", executor={"num_threads": 1}, plugins=plugins, **settings) as llm:
            found[kind] = shown(llm.generate(*requests()))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {"kv_cache": {"num_blocks": 400}},
    "small steps": {"kv_cache": {"num_blocks": 400}, "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 8}},
    "few blocks": {"kv_cache": {"num_blocks": 24, "block_size": 4}, "max_model_len": 90, "scheduler": {"max_num_seqs": 8}},
    "no sharing": {"kv_cache": {"num_blocks": 60, "block_size": 4, "allocator": "paged"}, "max_model_len": 110},
    "processor": {"kv_cache": {"num_blocks": 400}, "sampling": {"logits_processors": ["no_repeat"]}},
}


@pytest.mark.parametrize(("tp", "pp"), WORLDS)
@pytest.mark.parametrize("kind", SETTINGS)
def test_answers_are_those_of_one_rank(
    open_llm: Any, folder: Path, wanted: dict[str, Answers], tp: int, pp: int, kind: str
) -> None:
    plugins = {"processors": Processors()} if kind == "processor" else {}
    llm = open_llm(folder, tp, pp, plugins=plugins, **SETTINGS[kind])
    shown(llm.generate(*requests())).check(wanted[kind])
    shown(llm.generate(*requests())).check(wanted[kind])  # with what is cached now
    assert llm.stats().kv_usage == 0


def test_what_engines_of_all_settings_agree_on(wanted: dict[str, Answers]) -> None:
    others = {kind: answers.tokens for kind, answers in wanted.items() if kind != "processor"}
    assert all(tokens == others["usual"] for tokens in others.values())
    assert wanted["processor"].tokens != others["usual"]
    assert all(len(answers.logprobs) > 100 for answers in wanted.values())


@pytest.mark.parametrize(("tp", "pp"), WORLDS)
def test_logits_that_are_no_numbers_end_their_request_alone(open_llm: Any, tmp_path: Path, tp: int, pp: int) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][77] = float("nan")

    llm = open_llm(make_checkpoint(tmp_path, edit=edit), tp, pp)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [alone] = llm.generate([[5, 6, 7]], params)
    good, bad = llm.generate([[5, 6, 7], [5, 77, 7]], params)
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
    assert bad.outputs[0].finish_reason == "error"


@pytest.mark.parametrize(("tp", "pp"), WORLDS)
def test_sleep_and_wake(ranks: Any, folder: Path, tp: int, pp: int) -> None:
    several = ranks(folder, tp, pp)

    def tokens() -> Any:
        for name, prompt in zip("abc", some_prompts(20, 3, 9), strict=True):
            several.driver.add(name, prompt)
        found = several.driver.generate(12)
        for name in "abc":
            several.driver.finish(name)
        several.executor.execute_model(several.driver.plan({}))
        return found

    before = tokens()
    for level in (1, 2):
        several.executor.sleep(level)
        several.executor.wake_up()
        assert tokens() == before


@pytest.mark.parametrize(("tp", "pp"), WORLDS)
def test_all_is_given_back(folder: Path, open_llm: Any, tp: int, pp: int) -> None:
    llm = open_llm(folder, tp, pp)
    workers = llm.engine.collective_rpc(lambda worker: worker)
    links = [worker.links for worker in workers]
    assert all((link.tp is None) == (tp == 1) and (link.pp is None) == (pp == 1) for link in links)
    llm.shutdown()
    assert all(link.tp is link.pp is None for link in links)
    assert not any(hasattr(worker, "runner") for worker in workers)
