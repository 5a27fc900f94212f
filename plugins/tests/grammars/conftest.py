"""What the grammar tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pegboard.testing.conformance._grammar_cases import composition
from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend
from pegboard_plugins.options import StandardOptions


@pytest.fixture(scope="session")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(composition())


@pytest.fixture(scope="session")
def any_whitespace() -> LLGuidanceBackend:
    return LLGuidanceBackend(composition(), StandardOptions(json_whitespace="any"))


@pytest.fixture(scope="session")
def refusal(backend: LLGuidanceBackend) -> Callable[[GrammarSpec], str]:
    """Why a grammar is refused; both ``validate`` and ``compile`` do it, with the same words."""

    def why(spec: GrammarSpec) -> str:
        told = []
        for refuse in (backend.validate, backend.compile):
            with pytest.raises(ValueError) as raised:
                refuse(spec)
            told.append(str(raised.value))
        assert told[0] == told[1]
        return told[0]

    return why
