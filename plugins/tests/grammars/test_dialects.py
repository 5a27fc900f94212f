"""Regular expressions and grammars: what the dialects can do."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.testing.conformance.grammar import encode, spelled, walk
from pegboard.wire import GrammarKind, GrammarSpec
from pegboard_plugins.grammars.llguidance_backend import LLGuidanceBackend
from pegboard_plugins.grammars.regex import check_regex


def says(backend: LLGuidanceBackend, kind: GrammarKind, text: str, answer: str) -> bool:
    """Whether ``answer`` is in the language."""
    state = backend.compile(GrammarSpec(kind, text)).start()
    return state.accept(encode(answer)) and state.accept([0])


@pytest.mark.parametrize(
    ("regex", "inside", "outside"),
    [
        ("a+?", ["a", "aaa"], ["", "b"]),
        ("^a|b$", ["a", "b"], ["ab", "c"]),
        ("(?i)abc", ["aBC"], ["abd"]),
        ("a/b\\/c", ["a/b/c"], ["a/b"]),
        ("a\nb", ["a\nb"], ["a b"]),
        (".", ["é", '"'], ["\n", "ab"]),
        ("(?s).", ["\n"], [""]),
        (r"\d\w[^\s]", ["3é!"], ["3 !"]),
        (r"[[:alpha:]][a[bc]]{2}", ["xab"], ["1ab", "xad"]),
        ("(?x) a b # comment", ["ab"], ["a b"]),
        ("#//a", ["#//a"], ["a"]),
        (r"\u0041\x42", ["AB"], ["ab"]),
        (r"(?P<year>\d{4})-(?:0[1-9]|1[0-2])", ["2024-12"], ["2024-13", "2024-"]),
        (r"a{0}|x", ["", "x"], ["a"]),
        (r"\*\+[*+?]??", ["*+", "*+?"], ["*"]),
        (r"\{\"a\": \d\}", ['{"a": 1}'], ["{}"]),
    ],
)
def test_regular_expressions(backend: LLGuidanceBackend, regex: str, inside: list[str], outside: list[str]) -> None:
    assert [text for text in inside if not says(backend, "regex", regex, text)] == []
    assert [text for text in outside if says(backend, "regex", regex, text)] == []


@pytest.mark.parametrize("regex", ["a**", "a*+", "a+*", "a?+", "a{2}{3}", "a{2}*", "a???", "(a)*{2,}", "a+?*", "[a]++"])
def test_repetitions_of_repetitions_are_refused(regex: str) -> None:
    with pytest.raises(ValueError, match="repeats a repetition"):
        check_regex(regex)


@pytest.mark.parametrize(
    "regex", ["a*?", "a??", "a{2}?", "(a*)*", r"a\**", r"\*\*", "[*+]*", "[]*+]*", "[^]*+]+", "a*b*", "[[a*]*]*", "a{,x}", "{}"]
)
def test_other_repetitions_are_not(regex: str) -> None:
    check_regex(regex)


LARK = r"""
// a comment with "quotes" <and> brackets
start: expr
expr: term (("+" | "-") term)*
term: NUMBER | "(" expr ")"
NUMBER: /[1-9][0-9]{0,2}/ | "0"
"""
GBNF = r"""
# the same
root ::= term (("+" | "-") term)*
term ::= number |
  "(" root ")"
number ::= [1-9] [0-9]{0,2} | "0"
"""


@pytest.mark.parametrize("grammar", [LARK, GBNF], ids=["lark", "gbnf"])
def test_grammars(backend: LLGuidanceBackend, grammar: str) -> None:
    for text in ("0", "12+(3-4)", "((7))"):
        assert says(backend, "grammar", grammar, text), text
    for text in ("", "(", "1+", "007", "1234", "1 + 2"):
        assert not says(backend, "grammar", grammar, text), text
    compiled = backend.compile(GrammarSpec("grammar", grammar))
    ended = [taken for seed in range(20) if (taken := walk(compiled.start(), seed, limit=60)) is not None]
    assert ended
    for taken in ended:
        assert isinstance(eval(spelled(taken), {}), int)


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        ('start: "A"i /b{1,2}/', ["ab", "Abb"], ["b", "abbb"]),
        ('start: "a" ~ 2..3', ["aa", "aaa"], ["a", "aaaa"]),
        ('start: x{2}\nx: "a" | "b"?', ["", "ab"], ["aaa"]),
        ('%ignore / /\nstart: "a" "b"', ["ab", "a  b"], ["a\nb"]),
        ('start: "v: " %json {"type": "integer", "minimum": 1, "maximum": 9}', ["v: 3"], ["v: 0"]),
        ('start: "<" "b" ">" // <b>', ["<b>"], ["b"]),
        ('start: head "x"\nhead[lazy]: /[a-c]+=/', ["ab=x"], ["=x", "ab=c=x"]),
    ],
)
def test_features_of_lark(backend: LLGuidanceBackend, grammar: str, inside: list[str], outside: list[str]) -> None:
    assert [text for text in inside if not says(backend, "grammar", grammar, text)] == []
    assert [text for text in outside if says(backend, "grammar", grammar, text)] == []


def test_kinds_are_what_their_names_say(backend: LLGuidanceBackend) -> None:
    unknown: Any = "sonnet"
    with pytest.raises(ValueError, match="grammar kind 'sonnet' is not known; known are json_schema"):
        backend.validate(GrammarSpec(unknown, "x"))
