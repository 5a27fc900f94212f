"""End-to-end rig: tiny random checkpoints, the whole engine in float32, and transformers as the reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard import LLM, LLMEngine, RequestOutput, SamplingParams
from pegboard.engine.outputs import OutputKind
from pegboard.testing.checkpoints import make_checkpoint

CLOSE = 1e-3
"""A top-2 logit gap below which rounding may decide between two tokens."""

OpenLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with a context of 2048, vocabulary 1000, and a byte-level tokenizer without BOS."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture
def open_llm() -> Iterator[OpenLLM]:
    """``open_llm(folder, config fields)``: float32, one thread, closed after the test."""
    opened: list[LLM] = []

    def open_(folder: Path | str, **options: Any) -> LLM:
        settings: dict[str, Any] = {"dtype": "float32", "kv_cache": {"num_blocks": 400}, **options}
        settings["executor"] = {"num_threads": 1, **settings.get("executor", {})}
        opened.append(LLM(str(folder), **settings))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.shutdown()


class Reference:
    """transformers on the same folder, float32, eager attention."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()

    def gaps(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """For each token of ``output``, after those before it: how far its logit is from the best one's, 0 if it is the best."""
        logits = self.logits(prompt, output)
        return [float(row.max() - row[token]) for row, token in zip(logits, output, strict=True)]

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """[len(output), vocab] float64: what the model says before each token of ``output``."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :].double().numpy()

    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """[len(output), vocab] float64: log-softmax of ``logits``."""
        logits = self.logits(prompt, output)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Every token is the reference's own choice, or as good as it."""
        assert output, "no output"
        worst = max(self.gaps(prompt, output))
        assert worst < CLOSE, f"a token is {worst} below the reference's best"

    def check_same(self, prompt: Sequence[int], output: Sequence[int], expected: Sequence[int]) -> None:
        """Equal, or different from a place on where two tokens are as good as one another."""
        if list(output) == list(expected):
            return
        place = next((i for i, (a, b) in enumerate(zip(output, expected, strict=False)) if a != b), None)
        assert place is not None, f"lengths differ: {len(output)}, {len(expected)}"
        both = [self.gaps(prompt, [*expected[:place], t[place]])[-1] for t in (output, expected)]
        assert max(both) < CLOSE, f"different from output token {place} on: {output[place]} instead of {expected[place]} {both}"


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    return Reference(tiny)


@pytest.fixture(scope="session")
def reference_of() -> Callable[[Path], Reference]:
    return Reference


@dataclass
class Stream:
    """One request as its caller sees it, piece by piece. ``steps``: engine steps at which tokens came."""

    request_id: str
    prompt: list[int]
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finals: int = 0
    last: RequestOutput | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def finish_reason(self) -> str | None:
        return self.last.outputs[0].finish_reason if self.last else None


class Streams:
    """Runs requests on an engine and keeps what each one is told."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.all: dict[str, Stream] = {}
        self.step_number = 0

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, **more: Any) -> Stream:
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params, kind=OutputKind.DELTA, **more)
        self.all[request_id] = Stream(request_id, prompt)
        return self.all[request_id]

    def step(self) -> None:
        self.step_number += 1
        for output in self.engine.step():
            stream, piece = self.all[output.request_id], output.outputs[0]
            stream.pieces.append(piece.text)
            stream.tokens += piece.token_ids
            stream.logprobs += piece.logprobs or []
            if piece.token_ids:
                stream.steps.append(self.step_number)
            stream.finals += output.finished
            stream.last = output

    def run(self, limit: int = 20_000) -> None:
        """To the end; more than ``limit`` steps count as a hang."""
        end = self.step_number + limit
        while self.engine.has_unfinished_requests():
            self.step()
            assert self.step_number < end, f"still {self.engine.num_unfinished_requests} requests after {limit} steps"


@pytest.fixture
def streams() -> type[Streams]:
    return Streams


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """``random_prompts(lengths, seed)``: ids of the tiny vocabulary, no special ones."""

    def make(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(4, 1000) for _ in range(n)] for n in lengths]

    return make


@pytest.fixture(scope="session")
def greedy() -> Callable[..., SamplingParams]:
    """Greedy to ``max_tokens``, whatever is said."""

    def make(max_tokens: int, **more: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})

    return make
