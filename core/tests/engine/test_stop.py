"""Stop strings over pieces of any size."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.detokenizer import IncrementalDetokenizer
from pegboard.engine.stop import StopMatcher
from pegboard.testing.tiny_tokenizer import write_tokenizer


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


def test_an_unarmed_match_may_go_on_into_an_armed_one() -> None:
    matcher = StopMatcher(["ab", "abc"])
    assert matcher.feed("xab", armed=False) == "x", "abc may still come"
    assert matcher.feed("c") == ""
    assert matcher.matched == "abc"


ALPHABET = st.text("ab", min_size=1, max_size=4)
STOPS = st.lists(ALPHABET, min_size=1, max_size=4)


@given(st.text("ab", max_size=40), STOPS, st.data(), st.booleans())
@settings(max_examples=500, deadline=None)
def test_pieces_do_not_matter_and_only_a_possible_start_is_held(
    text: str, stops: list[str], data: st.DataObject, include: bool
) -> None:
    pieces = _cut(text, data)
    armed_from = data.draw(st.integers(0, len(pieces)))
    expected, matched = _reference(text, stops, include, armed=sum(map(len, pieces[:armed_from])))
    matcher, shown, read = StopMatcher(stops, include), "", ""
    for i, piece in enumerate(pieces):
        shown += matcher.feed(piece, armed=i >= armed_from)
        read += piece
        if matcher.matched is not None:
            break
        held = read[len(shown) :]
        assert held == max((s[:k] for s in stops for k in range(len(s)) if read.endswith(s[:k])), key=len)
    shown += matcher.release()
    assert (shown, matcher.matched) == (expected, matched)


@given(st.text("ab", max_size=40), ALPHABET)
@settings(max_examples=300, deadline=None)
def test_one_stop_string_is_found_where_find_finds_it(text: str, stop: str) -> None:
    shown, matched = run([text], [stop])
    assert "".join(shown) == (text[: text.find(stop)] if stop in text else text)
    assert matched == (stop if stop in text else None)


@given(st.text("ab", max_size=40), STOPS, st.data())
@settings(max_examples=300, deadline=None)
def test_several_are_found_where_find_finds_them_in_the_growing_text(text: str, stops: list[str], data: st.DataObject) -> None:
    """Whatever the pieces in which it grows, unless one that was found begins inside another that ends later."""
    pieces = _cut(text, data)
    grown = next((g for i in range(len(pieces)) if any(s in (g := "".join(pieces[: i + 1])) for s in stops)), None)
    shown, matched = run(pieces, stops)
    if grown is None:
        assert matched is None
        return
    start = min(grown.find(s) for s in stops if s in grown)
    ours = len("".join(shown))
    assert matched is not None
    assert grown.startswith(matched, ours)
    overtaken = any(grown.startswith(s, start) and start + len(s) > ours + len(matched) for s in stops)
    assert ours == start or (ours > start and overtaken)


def test_cost_does_not_grow_with_the_number_of_stop_strings() -> None:
    stops = [f"<{i}>" * 3 for i in range(2000)]
    matcher, text = StopMatcher(stops), "<1><2>" * 5000
    assert "".join([*(matcher.feed(c) for c in text), matcher.release()]) == text
    assert matcher.feed("<1999>" * 3) == ""
    assert matcher.matched == "<1999>" * 3


TEXT = "The 🙂 of the capital 👩‍👩‍👧, then e\u0301 and 漢字: France is the world\n\nParis 🙂.  End"


@pytest.fixture(scope="module", params=[False, True])
def tokens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RawTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_fallback=request.param)
    return RawTokenizer.from_file(str(folder / "tokenizer.json"))


def streamed(tokenizer: RawTokenizer, stops: list[str], include: bool = False) -> tuple[str, str | None, int]:
    """Text, match and number of tokens of the answer ``TEXT``, with the check that nothing beyond the match is shown."""
    detokenizer = IncrementalDetokenizer(cast(Tokenizer, Decoding(tokenizer)))
    matcher, shown, ids = StopMatcher(stops, include), "", tokenizer.encode(TEXT, add_special_tokens=False).ids
    for count, token_id in enumerate(ids, start=1):
        shown += matcher.feed(detokenizer.push(token_id))
        if matcher.matched is not None:
            return shown, matcher.matched, count
        assert not any(s in shown for s in stops)
    return shown + matcher.feed(detokenizer.flush()) + matcher.release(), matcher.matched, len(ids)


class Decoding:
    """Of a tokenizer only what detokenizing needs."""

    special_ids = frozenset[int]()

    def __init__(self, raw: RawTokenizer) -> None:
        self.decode, self.token_text = raw.decode, raw.id_to_token

    def token_bytes(self, token_id: int) -> bytes:
        return str(self.token_text(token_id)).encode()


@pytest.mark.parametrize("include", [False, True])
@given(start=st.integers(0, len(TEXT) - 1), length=st.integers(1, 12), more=st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_stop_strings_of_several_tokens(tokens: RawTokenizer, include: bool, start: int, length: int, more: int) -> None:
    """Anywhere in tokens and over any number of them, next to characters of several tokens, one a beginning of the other."""
    stop = TEXT[start : start + length]
    first = TEXT.find(stop)
    shown, matched, count = streamed(tokens, [TEXT[start : start + length + more], stop], include)
    assert (shown, matched) == (TEXT[: first + len(stop) * include], stop)
    before = tokens.decode(tokens.encode(TEXT, add_special_tokens=False).ids[: count - 1])
    assert stop not in before, "the match was there a token earlier"


@pytest.mark.parametrize(
    "stop", ["f the capi", "🙂 of", ", then", " of", "\n\nP", " 🙂.", "👧,", "\u0301 ", "字", "e", "\n", "End"]
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_next_to_characters_of_several_tokens(tokens: RawTokenizer, stop: str, include: bool) -> None:
    shown, matched, _ = streamed(tokens, [stop, stop + "never"], include)
    assert (shown, matched) == (TEXT[: TEXT.find(stop) + len(stop) * include], stop)


def test_stop_strings_that_are_not_there_change_nothing(tokens: RawTokenizer) -> None:
    assert streamed(tokens, ["never", "the cap!", "\ufffd", "End."])[:2] == (TEXT, None)


def _cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _reference(text: str, stops: list[str], include: bool, armed: int = 0) -> tuple[str, str | None]:
    """By definition: the first position after the first ``armed`` ones that a stop string ends at."""
    for end in range(armed + 1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None
