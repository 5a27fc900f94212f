"""What every transport must keep. Subclass ``TransportConformance``, give ``make`` and ``attach``.

Some tests call both in processes that they start; a test class travels there by value, what it uses must be importable.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import threading
import time
from functools import partial
from typing import Any

import pytest

from pegboard.contracts.transport import Closed
from pegboard.testing.conformance._transport_base import SIZES, in_thread, put_for_ever, while_serving
from pegboard.testing.conformance._transport_processes import ProcessCases
from pegboard.testing.processes import PATIENCE


class Unloadable:
    """Pickles; loading it raises."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("not to be loaded")


class TransportConformance(ProcessCases):
    """The contract of ``pegboard.contracts.transport``, as tests."""

    # -- messages ----------------------------------------------------------------------------------------------------

    def test_every_reader_gets_everything_in_order(self, ends: Any) -> None:
        writer, readers = ends(3)
        for start in range(0, 60, 4):
            sent = [{"number": number, "text": "x" * number} for number in range(start, start + 4)]
            for message in sent:
                writer.put(message, PATIENCE)
            for reader in readers:
                assert [reader.get(PATIENCE) for _ in sent] == sent

    @pytest.mark.parametrize("size", SIZES)
    def test_sizes(self, ends: Any, size: int) -> None:
        writer, (reader,) = ends(1)
        blob = random.Random(size).randbytes(size)
        message = (1, blob, bytearray(blob), pickle.PickleBuffer(bytearray(blob)))
        sending = in_thread(lambda: [writer.put(item, PATIENCE) for item in ("before", message, "after")])
        assert reader.get(PATIENCE) == "before"
        number, as_bytes, as_bytearray, as_buffer = reader.get(PATIENCE)
        assert (number, as_bytes, as_bytearray, bytes(as_buffer)) == (1, blob, blob, blob)
        assert (type(as_bytes), type(as_bytearray)) == (bytes, bytearray)
        assert not memoryview(as_buffer).readonly
        assert reader.get(PATIENCE) == "after"
        sending()

    def test_messages_outlive_what_comes_after_them(self, ends: Any) -> None:
        writer, (reader,) = ends(1)
        kept = []
        for number in range(300):
            writer.put(pickle.PickleBuffer(bytearray([number % 256]) * 30_000), PATIENCE)
            kept.append(reader.get(PATIENCE))
        assert all(bytes(message) == bytes([number % 256]) * 30_000 for number, message in enumerate(kept))

    def test_a_message_is_what_it_was_when_it_was_put(self, ends: Any) -> None:
        writer, (reader,) = ends(1)
        for size in (100, 20_000):
            changing = bytearray(b"a" * size)
            writer.put(pickle.PickleBuffer(changing), PATIENCE)
            changing[:] = b"b" * size
            assert bytes(reader.get(PATIENCE)) == b"a" * size

    def test_an_error_of_pickling_sends_nothing(self, ends: Any) -> None:
        writer, (reader,) = ends(1)
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            writer.put(threading.Lock(), PATIENCE)
        writer.put("next", PATIENCE)
        assert reader.get(PATIENCE) == "next"

    def test_an_error_of_loading_costs_its_own_message_only(self, ends: Any) -> None:
        writer, readers = ends(2)
        for message in ("before", Unloadable(), "after"):
            writer.put(message, PATIENCE)
        for reader in readers:
            assert reader.get(PATIENCE) == "before"
            with pytest.raises(Exception, match="not to be loaded"):
                reader.get(PATIENCE)
            assert reader.get(PATIENCE) == "after"

    def test_two_queues_do_not_mix(self, ends: Any) -> None:
        (one, (of_one,)), (two, (of_two,)) = ends(1), ends(1)
        for number in range(100):
            one.put(("one", number), PATIENCE)
            two.put(("two", number), PATIENCE)
            assert of_two.get(PATIENCE) == ("two", number)
            assert of_one.get(PATIENCE) == ("one", number)

    def test_puts_from_several_threads(self, ends: Any) -> None:
        writer, (reader,) = ends(1)

        def send(who: int) -> None:
            for number in range(200):
                writer.put((who, number), PATIENCE)

        senders = [in_thread(partial(send, who)) for who in range(4)]
        got = [reader.get(PATIENCE) for _ in range(800)]
        for sender in senders:
            sender()
        for who in range(4):
            assert [number for sender_, number in got if sender_ == who] == list(range(200))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def test_a_get_that_times_out_loses_nothing(self, ends: Any) -> None:
        writer, (reader,) = ends(1)
        for number in range(20):
            for timeout in (0, 0.001, 0.02):
                with pytest.raises(TimeoutError):
                    reader.get(timeout)
            writer.put(number, PATIENCE)
            assert reader.get(PATIENCE) == number

    def test_a_slow_reader_holds_the_writer_back(self, ends: Any) -> None:
        writer, readers = ends(2)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 10_000:
                writer.put((sent, b"x" * 1000), 0.2)
                sent += 1
                readers[0].get(PATIENCE)  # one reader is fast, the other does not read
        assert sent < 10_000
        assert [readers[1].get(PATIENCE)[0] for _ in range(sent)] == list(range(sent))
        writer.put("once more", PATIENCE)
        assert [reader.get(PATIENCE) for reader in readers] == ["once more"] * 2

    def test_a_large_put_that_times_out_sends_nothing(self, ends: Any) -> None:
        writer, (reader,) = ends(1)
        large = b"x" * 50_000_000
        sent: list[int] = []
        with contextlib.suppress(TimeoutError):  # a transport with that much room may take some
            while len(sent) < 20:
                writer.put((len(sent), large), 0.2)
                sent.append(len(sent))
        assert len(sent) < 20
        sending = in_thread(lambda: writer.put("after", PATIENCE))
        assert [reader.get(PATIENCE)[0] for _ in sent] == sent
        assert reader.get(PATIENCE) == "after"
        sending()

    def test_readers_may_attach_late(self) -> None:
        writer = self.make(2)
        try:
            with pytest.raises(TimeoutError):
                writer.wait_ready(0.05)
            first = type(self).attach(writer.handle(0))
            writer.put("early", PATIENCE)
            with pytest.raises(TimeoutError):
                writer.wait_ready(0.05)
            second = type(self).attach(writer.handle(1))
            writer.wait_ready(PATIENCE)
            assert [reader.get(PATIENCE) for reader in (first, second)] == ["early"] * 2
            first.close()
            second.close()
        finally:
            writer.close()

    def test_cancel_of_a_get(self, ends: Any) -> None:
        _, (reader,) = ends(1)
        waiting = in_thread(lambda: reader.get(PATIENCE))
        time.sleep(0.1)
        reader.cancel()
        with pytest.raises(Closed):
            waiting()
        with pytest.raises(Closed):
            reader.get(0)

    def test_cancel_of_a_put(self, ends: Any) -> None:
        writer, _ = ends(1)

        def fill() -> None:
            for _ in range(100_000):
                writer.put(b"x" * 1000, PATIENCE)

        waiting = in_thread(fill)
        time.sleep(0.3)
        writer.cancel()
        with pytest.raises(Closed):
            waiting()
        with pytest.raises(Closed):
            writer.put(1, 0)

    # -- the end -----------------------------------------------------------------------------------------------------

    def test_what_was_put_before_close_is_read(self, ends: Any) -> None:
        writer, readers = ends(2)
        for number in range(5):
            writer.put(number, PATIENCE)
        writer.close()
        for reader in readers:
            assert [reader.get(PATIENCE) for _ in range(5)] == list(range(5))
            for _ in range(2):
                with pytest.raises(Closed):
                    reader.get(PATIENCE)
        writer.close()
        with pytest.raises(Closed):
            writer.put(1, PATIENCE)

    def test_a_closed_reader_ends_the_queue(self, ends: Any) -> None:
        writer, readers = ends(2)
        readers[1].close()
        readers[1].close()
        with pytest.raises(Closed):
            readers[1].get(PATIENCE)
        with pytest.raises(Closed):
            put_for_ever(writer)

    def test_close_of_a_reader_ends_its_get(self, ends: Any) -> None:
        _, (reader,) = ends(1)
        waiting = in_thread(lambda: reader.get(PATIENCE))
        time.sleep(0.1)
        reader.close()
        with pytest.raises(Closed):
            waiting()

    def test_handles(self, ends: Any) -> None:
        writer = self.make(1)
        handle = pickle.loads(pickle.dumps(writer.handle(0)))
        with pytest.raises(ValueError):
            type(self).attach(self.other_version(handle))
        reader = type(self).attach(handle)
        with pytest.raises((ValueError, Closed)):  # some learn it from the writer, at their first get
            while_serving(writer, lambda: type(self).attach(handle).get(PATIENCE))
        with pytest.raises(ValueError):
            writer.handle(1)
        writer.put("still works", PATIENCE)
        assert reader.get(PATIENCE) == "still works"
        reader.close()
        writer.close()
