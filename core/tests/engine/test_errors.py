"""Errors cross processes whole."""

from __future__ import annotations

import pickle

import pytest

from pegboard.engine.errors import EngineDeadError, RequestFailed
from pegboard.plugins import CompositionError


@pytest.mark.parametrize(
    "error",
    [
        EngineDeadError(MemoryError("no room")),
        EngineDeadError("it was shut down"),
        RequestFailed(3, ValueError("prompt is empty")),
        CompositionError(["one", "two"]),
    ],
    ids=repr,
)
def test_errors_survive_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    for name in ("cause", "index", "problems"):
        assert repr(getattr(again, name, None)) == repr(getattr(error, name, None))
