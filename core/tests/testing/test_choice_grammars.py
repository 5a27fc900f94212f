"""The plain grammar backend of the testing kit keeps the contract, so the kit can be satisfied without a library."""

from __future__ import annotations

from typing import Any

from pegboard.contracts.grammar import GrammarBackend
from pegboard.testing.choice_grammars import ChoiceGrammars
from pegboard.testing.conformance.grammar import GrammarBackendConformance


class TestChoiceGrammars(GrammarBackendConformance):
    kinds = frozenset({"choice"})

    def make(self, composition: Any) -> GrammarBackend:
        return ChoiceGrammars(composition)
