"""Messages as bytes: what is cut into any pieces comes together again."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard_executor_mp.queue import MessageError
from pegboard_executor_mp.queue.frames import OUT_OF_BAND, Assembly, Payload, encode


def whole(message: Any) -> bytes:
    return b"".join(bytes(part) for part in encode(message).parts)


def through_one_chunk(message: Any) -> Any:
    frames = encode(message)
    body = whole(message)
    assert len(body) == frames.total
    return Payload.copy(memoryview(body), frames.pickle_bytes, frames.num_buffers).load()


def through_pieces(message: Any, size: int) -> Any:
    frames = encode(message)
    body = whole(message)
    assembly = Assembly(frames.pickle_bytes, frames.num_buffers)
    for number, start in enumerate(range(0, len(body), size)):
        for _ in range(1 + number % 2):  # some are added once more, as after an interrupt
            assembly.add(number, memoryview(body)[start : start + size])
    return assembly.finish().load()


blobs = st.builds(lambda size, seed: random.Random(seed).randbytes(size), st.integers(0, 3 * OUT_OF_BAND), st.integers(0, 9))
arrays = st.builds(
    lambda blob, kind: np.frombuffer(blob[: len(blob) // 8 * 8], kind).copy(), blobs, st.sampled_from(["u1", "f4", "i8"])
)
plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=20) | blobs | blobs.map(bytearray),
    lambda inner: (
        st.tuples(inner)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(message=plain, size=st.integers(1, 5 * OUT_OF_BAND))
def test_any_message_in_any_pieces(message: Any, size: int) -> None:
    size = max(size, len(whole(message)) // 200)
    for received in (through_one_chunk(message), through_pieces(message, size)):
        assert received == message
        assert repr(received)[:100] == repr(message)[:100]


@given(sent=st.lists(arrays, max_size=4), size=st.integers(100, 5 * OUT_OF_BAND))
def test_arrays(sent: list[Any], size: int) -> None:
    size = max(size, len(whole(sent)) // 200)
    for received in (through_one_chunk(sent), through_pieces(sent, size)):
        for before, after in zip(sent, received, strict=True):
            np.testing.assert_array_equal(before, after)
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            after[...] = 0  # writable


@pytest.mark.parametrize("size", [0, 1, OUT_OF_BAND - 1, OUT_OF_BAND, OUT_OF_BAND + 1, 10 * OUT_OF_BAND])
def test_out_of_band_buffers(size: int) -> None:
    blob = random.Random(size).randbytes(size)
    message = (blob, pickle.PickleBuffer(bytearray(blob)), (1, (blob,)))
    frames = encode(message)
    assert frames.num_buffers == (3 if size >= OUT_OF_BAND else 0)
    assert frames.pickle_bytes < 3 * OUT_OF_BAND + 200
    for received in (through_one_chunk(message), through_pieces(message, 1000)):
        assert type(received[0]) is bytes
        assert [hashlib.sha256(part).digest() for part in (received[0], received[1], received[2][1][0])] == [
            hashlib.sha256(blob).digest()
        ] * 3


def test_array_shapes() -> None:
    large = np.arange(3 * OUT_OF_BAND, dtype=np.int32)
    sent = [
        large[:0],
        large[5],
        large[::2],
        large.reshape(3, -1).T,
        np.zeros((0, 4)),
        np.zeros((), np.float32),
        np.array(["a", {}], object),
    ]
    frozen = large.copy()
    frozen.flags.writeable = False
    received = through_pieces([*sent, frozen], 9999)
    for before, after in zip(sent, received, strict=False):
        np.testing.assert_array_equal(before, after)
        assert after.shape == before.shape
    assert not received[-1].flags.writeable


def test_containers_keep_their_types_and_their_sharing() -> None:
    blob = b"x" * OUT_OF_BAND
    shared = [blob]
    loop: list[Any] = [blob]
    loop.append(loop)
    message = (shared, shared, OrderedDict(a=blob), {"k": (blob,)}, loop)
    received = through_one_chunk(message)
    assert received[:4] == message[:4]
    assert received[0] is received[1]
    assert type(received[2]) is OrderedDict
    assert received[4][1] is received[4]


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    sent = [
        torch.arange(100_000, dtype=torch.float32),
        torch.arange(100_000).to(torch.bfloat16).reshape(100, -1).T,
        torch.zeros(0, 3),
        torch.zeros((), dtype=torch.int64),
        torch.tensor([True, False]),
        torch.ones(5000, dtype=torch.float8_e4m3fn),
    ]
    assert encode(sent[0]).num_buffers == 1
    for received in (through_one_chunk(sent), through_pieces(sent, 10_000)):
        for before, after in zip(sent, received, strict=True):
            assert after.dtype == before.dtype
            assert torch.equal(before.float(), after.float())
            after.zero_()  # writable
    learning = torch.ones(20_000, requires_grad=True)
    received = through_one_chunk([learning, torch.nn.Parameter(learning)])
    assert [tensor.requires_grad for tensor in received] == [True, True]
    assert isinstance(received[1], torch.nn.Parameter)


def test_what_cannot_be_loaded() -> None:
    class Local: ...

    with pytest.raises((AttributeError, pickle.PicklingError)):
        encode(Local())
    payload = Payload(b"not a pickle", [])
    with pytest.raises(MessageError, match="UnpicklingError"):
        payload.load()
    with pytest.raises((BufferError, pickle.PicklingError)):
        encode(pickle.PickleBuffer(memoryview(bytearray(100_000))[::2]))
