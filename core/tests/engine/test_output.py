"""Output processing where a tokenizer fails: the answer ends, alone, and in the engine core too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.engine.outputs import OutputKind
from pegboard.wire import SamplingParams

Z = 26


@pytest.fixture
def picky(letters: Any) -> Any:
    """Cannot decode a "z"."""

    class Picky(letters):  # type: ignore[misc, valid-type]
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            if Z in token_ids:
                raise LookupError("no z here")
            return super().decode(token_ids, skip_special_tokens)  # type: ignore[no-any-return]

    return Picky()


@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("where", ["azb", "ab"])
def test_a_text_that_cannot_be_made_ends_its_answer_alone(make_engine: Any, picky: Any, kind: OutputKind, where: str) -> None:
    engine = make_engine({"x#0": where, "x#1": "hello", "y": "hello"}, tokenizer=picky)
    engine.add_request("x", "hi", SamplingParams(n=2, max_tokens=9), kind=kind)
    engine.add_request("y", "hi", SamplingParams(max_tokens=9), kind=OutputKind.FINAL)
    ends: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            ends |= {f"{output.request_id}{a.index}": (a.finish_reason, a.stop_reason) for a in output.outputs if a.finished}
    first = ("stop", None) if where == "ab" else ("error", "its text cannot be made: LookupError: no z here")
    assert ends == {"x0": first, "x1": ("stop", None), "y0": ("stop", None)}
    assert engine.stats().num_running == 0
    assert engine.client.core._live == set()


@pytest.mark.parametrize("kind", list(OutputKind))
def test_names_that_cannot_be_had(make_engine: Any, letters: Any, kind: OutputKind) -> None:
    """Those of the prompt's tokens come with the first answer, which may be its last news as well."""

    class Nameless(letters):  # type: ignore[misc, valid-type]
        def token_bytes(self, token_id: int) -> bytes | None:
            raise LookupError("no names")

    engine = make_engine({"x": "ab"}, tokenizer=Nameless())
    for max_tokens in (1, 5):
        engine.add_request("x", "hi", SamplingParams(prompt_logprobs=1, max_tokens=max_tokens), kind=kind)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [(o.finished, o.outputs[0].finish_reason) for o in outputs] == [(True, "error")]
        assert outputs[0].outputs[0].stop_reason == "its text cannot be made: LookupError: no names"
