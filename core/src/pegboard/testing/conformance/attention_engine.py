"""What an attention backend must keep inside an engine: the tokens of plain attention, however prompts are cut, shared and mixed.

Subclass ``AttentionEngineConformance`` and give ``backends``. Each is tried with a tiny random checkpoint, one thread, on the
processor, against the reference backend, which computes one request at a time, each prompt in one piece, and shares nothing. Its
cache is of the same type.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pegboard.plugins import AttentionBackendProvider, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard import LLM, LLMEngine, RequestOutput

CLOSE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""How far the best two log probabilities may be apart where rounding may decide between them."""
TOKENS = 6
_PATIENCE = 5_000
"""Steps after which a run counts as hung."""


class AttentionEngineConformance:
    """``backends``: what ``attention.backend`` says, and what goes with it: ``dtype`` (float32), ``block_size`` (8) and
    ``kv_dtype`` (auto). What stands behind a space in a key only tells several entries of one backend apart."""

    backends: ClassVar[Mapping[str, Mapping[str, Any]]]
    checkpoint: ClassVar[Mapping[str, Any]] = {"num_layers": 1, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 48}
    """Arguments of ``make_checkpoint``."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "rig" in metafunc.fixturenames:
            metafunc.parametrize("rig", self.backends, indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        from pegboard.testing.checkpoints import make_checkpoint

        fields = {"dtype": "float32", "block_size": 8, "kv_dtype": "auto", **cls.backends[request.param]}
        longest = 8 * fields["block_size"]
        folder = make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=longest, **cls.checkpoint)
        with Rig(folder, request.param.split()[0], **fields) as rig:
            yield rig

    def test_prompts_that_end_with_a_block_are_found_in_the_cache(self, rig: Rig) -> None:
        """All but one token of a prompt may be cached, never the whole of it: something must be computed."""
        size = rig.block_size
        llm = rig.open(kv_cache={"allocator": "prefix"})
        for prompt in rig.prompts(size - 1, size, size + 1, 2 * size - 1, 2 * size, 3 * size):
            hits = []
            for _ in range(3):
                [output] = rig.run(llm, [prompt])
                rig.check(prompt, output)
                hits.append(output.num_cached_tokens)
            assert hits == [0] + [(len(prompt) - 1) // size * size] * 2
            turn = [*prompt, *output.outputs[0].token_ids, 9]
            [output] = rig.run(llm, [turn])
            assert output.num_cached_tokens == (len(turn) - 2) // size * size, "the answer's full blocks are hits too"
            rig.check(turn, output)

    @pytest.mark.parametrize("neighbours", [0, 2])
    def test_a_prompt_in_pieces_gives_the_tokens_of_one_piece(self, rig: Rig, neighbours: int) -> None:
        size = rig.block_size
        [prompt, *others] = rig.prompts(2 * size + 5, size + 3, 2)[: 1 + neighbours]
        for budget in (max(size // 8, 1), size, size + 1, 4 * size):
            if budget <= neighbours:
                continue
            scheduler = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 4)}
            engine = rig.open(scheduler=scheduler, kv_cache={"allocator": "paged"}).engine
            for i, other in enumerate(others):
                rig.add(engine, f"other-{i}", other, 5 * size)
            started: set[str] = set()
            while len(started) < len(others):
                started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
            rig.add(engine, "pieces", prompt)
            outputs = rig.finish(engine, until="pieces")
            rig.check(prompt, outputs["pieces"])
            engine.abort_all()

    @pytest.mark.parametrize("allocator", ["paged", "prefix"])
    @pytest.mark.parametrize("max_num_seqs", [3, 10])
    def test_requests_of_different_length_do_not_mix(self, rig: Rig, max_num_seqs: int, allocator: str) -> None:
        size = rig.block_size
        prompts = rig.prompts(1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 3, 5, 3 * size, 3)
        llm = rig.open(scheduler={"max_num_seqs": max_num_seqs}, kv_cache={"allocator": allocator})
        for prompt, output in zip(prompts, rig.run(llm, prompts), strict=True):
            rig.check(prompt, output)

    def test_requests_that_come_and_go_do_not_mix(self, rig: Rig) -> None:
        size, rng = rig.block_size, random.Random(1)
        scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": size + 5}
        engine = rig.open(scheduler=scheduler, kv_cache={"num_blocks": 12}).engine
        waiting = [
            (f"r{i}", prompt) for i, prompt in enumerate(rig.prompts(2 * size, 3, size, 2 * size + 1, 1, size + 2, 7, size))
        ]
        prompts, outputs, aborted = dict(waiting), {}, set()
        for _ in range(_PATIENCE):
            for name, prompt in (waiting.pop() for _ in range(min(len(waiting), rng.choice((0, 1, 3))))):
                rig.add(engine, name, prompt)
                if rng.random() < 0.3:
                    aborted.add(name)
            outputs.update({output.request_id: output for output in engine.step()})
            for name in [n for n in aborted if n in outputs and not outputs[n].finished and rng.random() < 0.5]:
                engine.abort_request(name)
            if not waiting and not engine.has_unfinished_requests():
                break
        assert outputs.keys() == prompts.keys()
        ended = [name for name, output in outputs.items() if output.outputs[0].finish_reason == "length"]
        assert len(ended) >= 4
        for name in ended:
            rig.check(prompts[name], outputs[name])
        assert engine.stats().kv_usage == 0


class Rig:
    """Engines on one backend, and what the reference backend says."""

    def __init__(self, folder: Path, backend: str, *, dtype: str, block_size: int, kv_dtype: str) -> None:
        self._folder, self._backend = folder, backend
        self.dtype, self.block_size, self._kv_dtype = dtype, block_size, kv_dtype
        self._engine: LLM | None = None
        self._expected: dict[tuple[int, ...], Any] = {}
        self._reference = self._open("reference", plugins={"reference": Reference()}, kv_cache={"allocator": "paged"})

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._reference.shutdown()
        if self._engine is not None:
            self._engine.shutdown()

    def open(self, **fields: Any) -> LLM:
        """A fresh engine on the backend, in place of the one before."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._open(self._backend, **fields)
        return self._engine

    def prompts(self, *lengths: int) -> list[list[int]]:
        """Random ids, other ones for each length and place."""
        rng = random.Random(str(lengths))
        return [[rng.randrange(4, 1000) for _ in range(length)] for length in lengths]

    def run(self, llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
        return llm.generate(list(prompts), _params())

    def add(self, engine: LLMEngine, name: str, prompt: list[int], tokens: int = TOKENS) -> None:
        engine.add_request(name, {"prompt_token_ids": prompt}, _params(tokens))

    def finish(self, engine: LLMEngine, until: str) -> dict[str, RequestOutput]:
        """Steps until that request has ended; the last output of each."""
        outputs: dict[str, RequestOutput] = {}
        for _ in range(_PATIENCE):
            outputs.update({output.request_id: output for output in engine.step()})
            if until in outputs and outputs[until].finished:
                return outputs
        raise AssertionError(f"{until} has not ended after {_PATIENCE} steps")

    def check(self, prompt: list[int], output: RequestOutput) -> None:
        """The reference's tokens, or others from a place on where its best two are as good as one another."""
        key = tuple(prompt)
        if key not in self._expected:
            [self._expected[key]] = self.run(self._reference, [prompt])
        expected, found = self._expected[key].outputs[0], output.outputs[0]
        assert len(found.token_ids) == len(expected.token_ids)
        for place, (ours, theirs) in enumerate(zip(found.token_ids, expected.token_ids, strict=True)):
            if ours != theirs:
                best = sorted((entry.logprob for entry in expected.logprobs[place].values()), reverse=True)
                gap = best[0] - best[1]
                assert gap < CLOSE[self.dtype], f"{len(prompt)} tokens, output token {place}: {ours} instead of {theirs} ({gap=})"
                return

    def _open(self, backend: str, **fields: Any) -> LLM:
        from pegboard import LLM

        sizes = {"num_blocks": 60, "block_size": self.block_size, "dtype": self._kv_dtype}
        kv_cache = {**sizes, **fields.pop("kv_cache", {})}
        attention, executor = {"backend": backend}, {"num_threads": 1}
        return LLM(str(self._folder), dtype=self.dtype, attention=attention, executor=executor, kv_cache=kv_cache, **fields)


class Reference:
    """A plugin that offers the reference backend by name."""

    @hookimpl
    def attention_backends(self) -> Iterator[AttentionBackendProvider]:
        yield AttentionBackendProvider(
            name="reference", target="pegboard.testing.reference_attention:ReferenceAttentionBackend", priority=-100
        )


def _params(tokens: int = TOKENS) -> Any:
    from pegboard import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
