"""Where each token begins in the text, for real tokenizers: of answers, and of prompts that are echoed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.answer_text import LocatedText
from pegboard.engine.echo import echoed_prompt
from pegboard.engine.token_names import TokenNames
from pegboard.testing.tiny_tokenizer import write_tokenizer
from pegboard_plugins.tokenizers.hf import HFTokenizer

TEXTS = [
    "Hello, world. The capital of France is Paris.",
    "🙂👩‍👩‍👧 안녕하세요 नमस्ते e\u0301 \u200d 漢字, then ASCII é",
    "  two spaces\n\n\ttabs ",
    "a literal \ufffd stays",
    "<|im_start|>user\nHi<|im_end|>\n",
    "x",
]
KINDS = ["byte level", "byte level with BOS", "byte fallback", "byte fallback with BOS"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_fallback="fallback" in request.param, bos="BOS" in request.param)
    return HFTokenizer(ModelSource(str(folder), str(folder), "", "hf", {}))


def located(tokenizer: Tokenizer, ids: list[int], skip: bool = True, start: int = 0) -> tuple[str, list[int]]:
    text, pieces, offsets = LocatedText(tokenizer, skip, start=start), [], []
    for token_id in ids:
        offsets.append(text.locate(token_id))
        pieces.append(text.push(token_id))
    return "".join([*pieces, text.flush()]), offsets


def first_bytes(tokenizer: Tokenizer, ids: list[int], text: str) -> list[int]:
    """The character of ``text`` that holds each token's first byte, for ids that spell it but for spaces put before pieces."""
    characters = [i for i, c in enumerate(text) for _ in c.encode()] + [len(text)]
    places, rest = [], text.encode()
    for token_id in reversed(ids):
        spelled = _spelled(tokenizer, token_id)
        assert rest.endswith((spelled, spelled.removeprefix(b" ")))
        rest = rest.removesuffix(spelled if rest.endswith(spelled) else spelled.removeprefix(b" "))
        places.append(characters[len(rest)])
    assert not rest
    return places[::-1]


def _spelled(tokenizer: Tokenizer, token_id: int) -> bytes:
    data = tokenizer.token_bytes(token_id)
    return (tokenizer.token_text(token_id) or "").encode() if data is None else data


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_index_the_text_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    found, offsets = located(tokenizer, ids, skip=False)
    if "<|" in text and found != text:
        pytest.skip("this tokenizer puts a space after special tokens, which nothing takes away")
    assert found == text
    assert offsets == first_bytes(tokenizer, ids, text)
    assert located(tokenizer, ids, skip=False, start=7)[1] == [o + 7 for o in offsets]


@settings(max_examples=150)
@given(data=st.data())
def test_offsets_of_any_tokens_are_in_order_and_fit(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Also where characters break off, or never were any."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    skip = data.draw(st.booleans())
    text, offsets = located(tokenizer, ids, skip)
    assert text == tokenizer.decode(ids, skip)
    assert offsets == sorted(offsets)
    assert all(0 <= o <= len(text) for o in offsets)
    for i, (token_id, offset) in enumerate(zip(ids, offsets, strict=True)):
        spelled = _spelled(tokenizer, token_id).decode(errors="replace")
        hidden = skip and token_id in tokenizer.special_ids
        if i and not hidden and "\ufffd" not in spelled:
            assert text[offset:].startswith(spelled) or offset == 0, (i, text, offsets)


@pytest.mark.parametrize("text", TEXTS)
def test_an_echoed_text_is_as_it_was_written(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    extra = len(ids) - len(tokenizer.encode(text, add_special_tokens=False))
    echo = echoed_prompt(tokenizer, TokenNames(tokenizer), ids, text, skip_special_tokens=True, located=True)
    assert echo.text == text
    assert echo.offsets == [0] * extra + first_bytes(tokenizer, ids[extra:], text)
    assert len(echo.tokens) == len(ids)
    assert echoed_prompt(tokenizer, TokenNames(tokenizer), ids, text, skip_special_tokens=True, located=False).text == text


@pytest.mark.parametrize("skip", [True, False])
def test_an_echo_of_ids_is_their_decoding(tokenizer: Tokenizer, skip: bool) -> None:
    names = TokenNames(tokenizer)
    for ids in ([50, 60, 70], tokenizer.encode("漢字")[2:], [2, 300, 3], [0xE6 + 4, 300]):
        plain = echoed_prompt(tokenizer, names, ids, None, skip_special_tokens=skip, located=False)
        found = echoed_prompt(tokenizer, names, ids, None, skip_special_tokens=skip, located=True)
        assert plain.text == found.text == tokenizer.decode(ids, skip)
        assert (plain.tokens, plain.offsets) == ([], [])
        assert found.offsets == sorted(found.offsets)
        assert found.offsets[0] == 0


def test_names_of_tokens(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer)
    assert names[2] == ("<|im_start|>", None)
    assert names[10**6] == ("", None)
    broken = [names[i] for i in tokenizer.encode("🙂", add_special_tokens=False) if names[i][0].startswith("bytes:")]
    assert b"".join(data or b"" for _, data in broken) == "🙂".encode()
    assert broken[0][0] == "bytes:\\xf0"
    [*_, last] = tokenizer.encode("so the")
    assert names[last] == (" the", b" the")
