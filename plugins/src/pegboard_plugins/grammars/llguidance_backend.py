"""LLGuidanceBackend: grammars by llguidance, whose masks are computed as they are needed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pegboard.contracts.grammar import Grammar, GrammarBackend
from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.checker import checker
from pegboard_plugins.grammars.sources import Whitespace, library_grammar
from pegboard_plugins.grammars.state import LLGrammar, start_matcher
from pegboard_plugins.grammars.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pegboard.plugins import Composition
    from pegboard_plugins.options import StandardOptions

_NAMES = {"json_schema": "JSON schema", "json_object": "JSON object", "choice": "list of choices"}


class LLGuidanceBackend(GrammarBackend):
    """Thread-safe. Compiling runs without the interpreter's lock, but for the vocabulary, once (see ``make_vocabulary``)."""

    def __init__(self, composition: Composition, options: StandardOptions | None = None) -> None:
        self._composition = composition
        self._whitespace: Whitespace = options.json_whitespace if options is not None else "fixed"
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def validate(self, spec: GrammarSpec) -> None:
        """Finds all but languages whose texts the model's vocabulary cannot spell."""
        try:
            checker().check(spec, self._whitespace)
        except ValueError as error:
            raise _about(spec, error) from None

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.validate(spec)
        vocabulary = self._made_vocabulary()
        try:
            matcher = start_matcher(library_grammar(spec, self._whitespace), vocabulary)
        except ValueError as error:
            raise _about(spec, error) from None
        return LLGrammar(matcher, vocabulary)

    def _made_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._composition)
            return self._vocabulary


def _about(spec: GrammarSpec, error: ValueError) -> ValueError:
    """``error`` with what it is about: a short expression is shown."""
    shown = f" {spec.text!r}" if spec.kind == "regex" and len(spec.text) <= 80 else ""
    return ValueError(f"the {_NAMES.get(spec.kind, spec.kind)}{shown} cannot be served: {error}")
