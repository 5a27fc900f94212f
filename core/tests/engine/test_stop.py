"""Stop strings over pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.engine.stop import StopMatcher


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.release()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["Hello", " world"], [], ["Hello", " world", ""], None),
        (["ab", "c<", "st", "op", ">d"], ["<stop>"], ["ab", "c", "", "", ""], "<stop>"),
        (["a<st", "ar>"], ["<stop>"], ["a", "<star>", ""], None),
        (["a<st"], ["<stop>"], ["a", "<st"], None),
        (["aab"], ["ab"], ["a"], "ab"),
        (["one two three"], ["two", "two three"], ["one "], "two"),
        (["xyz"], ["yz", "z"], ["x"], "yz"),
        (["🙂st", "op"], ["stop"], ["🙂", ""], "stop"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: list[str], matched: str | None) -> None:
    assert run(pieces, stops) == (shown, matched)


def test_the_stop_string_itself_can_be_kept() -> None:
    assert run(["a ST", "OP b"], ["STOP"], include=True) == (["a ", "STOP"], "STOP")


def test_a_match_does_not_count_while_disarmed() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab a", armed=False) == "ab "
    assert matcher.matched is None
    assert matcher.feed("b!", armed=True) == ""
    assert matcher.matched == "ab"


def test_nothing_is_taken_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("more") == "" == matcher.release()


ALPHABET = st.text("ab", min_size=1, max_size=4)


@given(st.text("ab", max_size=40), st.lists(ALPHABET, min_size=1, max_size=3), st.data(), st.booleans())
@settings(max_examples=500, deadline=None)
def test_pieces_do_not_matter_and_only_a_possible_start_is_held(
    text: str, stops: list[str], data: st.DataObject, include: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected, matched = _reference(text, stops, include)
    matcher, shown, read = StopMatcher(stops, include), "", ""
    for piece in pieces:
        shown += matcher.feed(piece)
        read += piece
        if matcher.matched is not None:
            break
        held = read[len(shown) :]
        assert held == max((s[:k] for s in stops for k in range(len(s)) if read.endswith(s[:k])), key=len)
    shown += matcher.release()
    assert (shown, matcher.matched) == (expected, matched)


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop
