from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from pegboard_executor_mp.packing import pack, pack_plain, unpack


def test_what_cannot_be_imported_goes_by_value() -> None:
    table = {"a": 5}

    class Local:
        value = 17

    function, instance = unpack(pack((lambda x: table["a"] + x, Local())))
    assert function(2) == 7
    assert instance.value == 17


def test_classes_of_the_script_go_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has another ``__main__``."""
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec("class Own:\n    def __init__(self, x): self.x = x", script.__dict__)
    packed = pack([script.Own(3)])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert unpack(packed)[0].x == 3


@pytest.mark.parametrize("how", [pack, pack_plain])
def test_arrays_go_as_buffers_and_stay_writable(how: Any) -> None:
    array = np.arange(100_000)
    data, buffers = how({"array": array})
    assert len(data) < 1000
    assert sum(memoryview(buffer).nbytes for buffer in buffers) == array.nbytes
    back = unpack((data, tuple(bytearray(buffer) for buffer in buffers)))["array"]
    assert (back == array).all()
    back[0] = 1


@pytest.mark.slow
def test_tensors_go_as_buffers() -> None:
    import torch

    tensor = torch.randn(300, 300).bfloat16()
    data, buffers = pack([tensor])
    assert len(data) < 1000
    (back,) = unpack((data, tuple(bytearray(buffer) for buffer in buffers)))
    assert torch.equal(back, tensor)
