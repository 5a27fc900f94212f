"""Values on their way to another process, as a pickle and its large buffers.

They are packed apart from the message that carries them, so that one which cannot be loaded fails its own call only, and the
number of that call is known.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import ChainMap
from typing import Any, Final

import cloudpickle

from pegboard_executor_mp.queue import tensors

Packed = tuple[bytes, tuple[Any, ...]]
PROTOCOL: Final = 5


def pack(value: Any) -> Packed:
    """Functions and classes that other processes cannot import (lambdas, local ones, those of a script) go by value. Raises
    whatever pickling raises."""
    stream = io.BytesIO()
    buffers: list[Any] = []
    _ByValue(stream, buffers).dump(value)
    return stream.getvalue(), tuple(buffers)


def pack_plain(value: Any) -> Packed:
    """Several times faster; everything goes by name. For the messages of a step."""
    buffers: list[Any] = []
    return pickle.dumps(value, PROTOCOL, buffer_callback=buffers.append), tuple(buffers)


def unpack(packed: Packed) -> Any:
    """Raises whatever unpickling raises."""
    data, buffers = packed
    return pickle.loads(data, buffers=buffers)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO, buffers: list[Any]) -> None:
        # read by the base's constructor; tensors then go as buffers, not through torch's own file format
        special = tensors.reducers() if "torch" in sys.modules else {}
        self.dispatch_table = ChainMap(special, cloudpickle.Pickler.dispatch_table)
        super().__init__(stream, protocol=PROTOCOL, buffer_callback=buffers.append)
