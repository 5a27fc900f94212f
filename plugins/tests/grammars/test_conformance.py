"""The standard grammar backend keeps the contract."""

from __future__ import annotations

from typing import Any

from pegboard.contracts.grammar import GrammarBackend
from pegboard.testing.conformance.grammar import GrammarBackendConformance
from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend


class TestLark(GrammarBackendConformance):
    grammar = 'start: "(" AB+ ")"\nAB: "ab"'

    def make(self, composition: Any) -> GrammarBackend:
        return LLGuidanceBackend(composition)


class TestGBNF(TestLark):
    grammar = 'root ::= "(" ab+ ")" # a comment\nab ::= "a" [b]'
