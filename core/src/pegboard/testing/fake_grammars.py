"""FakeGrammars: languages of token ids, for schedulers and engines without a grammar compiler."""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from pegboard.contracts.grammar import GrammarStates
from pegboard.wire import GrammarOutput, GrammarSpec


@dataclass(frozen=True, slots=True)
class FakeGrammar:
    """``length`` tokens, each of which leaves a remainder by ``modulus`` that depends on all before it: a token that is accepted
    twice or not at all changes everything after it."""

    modulus: int
    length: int

    @classmethod
    def of(cls, spec: GrammarSpec) -> FakeGrammar:
        modulus, length = spec.text.split()
        return cls(int(modulus), int(length))

    @property
    def spec(self) -> GrammarSpec:
        return GrammarSpec("grammar", f"{self.modulus} {self.length}")

    def allowed(self, output: Sequence[int], vocab_size: int) -> range:
        """What may follow ``output``."""
        remainder = zlib.crc32(array("q", output).tobytes()) % self.modulus
        return range(remainder, vocab_size if len(output) < self.length else 0, self.modulus)

    def complete(self, output: Sequence[int]) -> bool:
        return len(output) >= self.length


def first_allowed(token: int, allowed: Sequence[int]) -> int:
    """What a model that would choose ``token`` chooses among ``allowed``, which is in rising order: the first from there on, or
    the first of all."""
    place = bisect_left(allowed, token)
    return allowed[place if place < len(allowed) else 0]


@dataclass
class FakeGrammars(GrammarStates):
    """``start`` takes in a request before its scheduler does. ``outputs``: what each unfinished request has accepted. Questions
    about requests that have not started or have ended raise ``KeyError``; a mask for a finished language ``AssertionError``."""

    vocab_size: int
    outputs: dict[str, list[int]] = field(default_factory=dict)
    grammars: dict[str, FakeGrammar] = field(default_factory=dict)

    def start(self, request_id: str, spec: GrammarSpec) -> None:
        self.outputs[request_id], self.grammars[request_id] = [], FakeGrammar.of(spec)

    def bitmasks(self, step_id: int, slots: Sequence[int], request_ids: Sequence[str]) -> GrammarOutput:
        assert len(slots) == len(request_ids) == len(set(request_ids)), "one request per slot"
        return GrammarOutput(step_id=step_id, slots=list(slots), bitmask=b"".join(map(self._mask, request_ids)))

    def _mask(self, request_id: str) -> bytes:
        grammar, output = self.grammars[request_id], self.outputs[request_id]
        assert not grammar.complete(output), f"{request_id!r} has ended with its grammar"
        bits = sum(1 << token for token in grammar.allowed(output, self.vocab_size))
        return bits.to_bytes(-(-self.vocab_size // 32) * 4, "little")

    def accept(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        grammar, output = self.grammars[request_id], self.outputs[request_id]
        for token in token_ids:
            if token not in grammar.allowed(output, self.vocab_size):
                return f"token {token} does not fit the grammar"
            output.append(token)
        return None

    def terminated(self, request_id: str) -> bool:
        return self.grammars[request_id].complete(self.outputs[request_id])

    def forget(self, request_id: str) -> None:
        self.outputs.pop(request_id, None)
        self.grammars.pop(request_id, None)


def allowed_by(grammar: GrammarOutput, slot: int) -> list[int]:
    """The ids that the mask of ``slot`` has."""
    size = len(grammar.bitmask) // len(grammar.slots)
    place = grammar.slots.index(slot) * size
    bits = int.from_bytes(grammar.bitmask[place : place + size], "little")
    return [token for token in range(8 * size) if bits >> token & 1]
