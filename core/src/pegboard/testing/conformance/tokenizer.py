"""Conformance of a Tokenizer. Subclass and give ``make``; set ``byte_level = False`` for kinds that may normalise text, and
``every_byte = False`` for those that cannot spell every byte."""

from __future__ import annotations

import abc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import ClassVar

import pytest

from pegboard.contracts.tokenizer import ChatTemplateError, Tokenizer
from pegboard.engine.detokenizer import REPLACEMENT
from pegboard.testing.text_stream import check_stream

TEXTS = (
    "",
    " ",
    "   \n\n\t ",
    "Hello, world!",
    "  two  spaces, trailing  ",
    "don't I'LL we've",
    "1234567890 3.14 1,000,000\n\n42",
    "def f(x):\n\treturn x ** 2\r\n",
    "naïve café — “quotes” … ﬁ ½ Ⅷ ²",
    "日本語のテキストと中文和한국어",
    "Привет, мир! مرحبا بالعالم नमस्ते ไทย",
    "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 \u00a0\u3000\u200b",
    "a" * 300,
    "\x00\x01\x7f\ufffd\U0010ffff",
)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class TokenizerConformance(abc.ABC):
    byte_level: ClassVar[bool] = True
    """Whether decoding gives back every text exactly."""
    every_byte: ClassVar[bool] = True
    """Whether each single byte has a token: byte-level vocabularies, and those with byte fallback."""

    @abc.abstractmethod
    def make(self) -> Tokenizer: ...

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return self.make()

    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_are_in_range_and_repeatable(self, tokenizer: Tokenizer, text: str) -> None:
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens)
            assert isinstance(ids, list)
            assert all(type(token_id) is int and 0 <= token_id < tokenizer.vocab_size for token_id in ids)
            assert tokenizer.encode(text, add_special_tokens) == ids
        if text:
            assert ids

    @pytest.mark.parametrize("text", TEXTS)
    def test_decoding_gives_the_text_back(self, tokenizer: Tokenizer, text: str) -> None:
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if self.byte_level:
            assert decoded == text
        else:
            assert decoded.split() == text.split() or not text.isprintable()

    def test_special_tokens_around_a_prompt_are_left_out_when_decoding(self, tokenizer: Tokenizer) -> None:
        bare = tokenizer.encode("Hello, world!", add_special_tokens=False)
        full = tokenizer.encode("Hello, world!")
        assert [token_id for token_id in full if token_id not in tokenizer.special_ids] == bare
        assert tokenizer.decode(full) == tokenizer.decode(bare)

    def test_special_ids_decode_to_nothing_unless_asked_for(self, tokenizer: Tokenizer) -> None:
        for token_id in tokenizer.special_ids:
            assert 0 <= token_id < tokenizer.vocab_size
            assert tokenizer.decode([token_id]) == ""
            assert tokenizer.decode([token_id], skip_special_tokens=False) != ""
        if tokenizer.eos_token_id is not None:
            assert tokenizer.eos_token_id in tokenizer.special_ids

    def test_ids_without_a_token_decode_to_nothing(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        for absent in (tokenizer.vocab_size, tokenizer.vocab_size + 1000, 2**31, 2**40, -1):
            assert tokenizer.token_text(absent) is None
            assert tokenizer.decode([absent]) == ""
            assert tokenizer.decode([*ids, absent]) == tokenizer.decode(ids)
        assert tokenizer.decode([]) == ""

    def test_token_text_spells_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        for token_id in tokenizer.encode("Hello, world!", add_special_tokens=False):
            assert tokenizer.token_text(token_id)
        assert tokenizer.token_text(tokenizer.vocab_size - 1) is not None

    def test_incomplete_utf8_gives_the_replacement_character(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("\U0001f9e9", add_special_tokens=False)
        if len(ids) > 1 and self.byte_level:
            assert "\ufffd" in tokenizer.decode(ids[:-1])

    @pytest.mark.parametrize("text", TEXTS)
    def test_bytes_of_tokens_join_to_the_text(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
        assert all((piece is None) == (token_id in tokenizer.special_ids) for piece, token_id in zip(pieces, ids, strict=True))
        joined = b"".join(piece for piece in pieces if piece is not None)
        expected = text if self.byte_level else tokenizer.decode(ids)
        assert joined in (expected.encode(), b" " + expected.encode())

    def test_only_tokens_that_can_be_text_have_bytes(self, tokenizer: Tokenizer) -> None:
        for token_id in (*tokenizer.special_ids, tokenizer.vocab_size, tokenizer.vocab_size + 1000, 2**31, 2**40, -1, -(2**40)):
            assert tokenizer.token_bytes(token_id) is None
        for token_id in range(tokenizer.vocab_size):
            known = tokenizer.token_text(token_id) is not None and token_id not in tokenizer.special_ids
            assert isinstance(tokenizer.token_bytes(token_id), bytes if known else type(None))

    def test_every_byte_has_a_token(self, tokenizer: Tokenizer) -> None:
        found = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
        if self.every_byte:
            assert found >= {bytes([byte]) for byte in range(256)}

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_can_be_decoded_while_it_grows(self, tokenizer: Tokenizer, text: str) -> None:
        pieces = check_stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
        assert pieces[-1] == "" or REPLACEMENT in text
        assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)

    @pytest.mark.parametrize("skip_special_tokens", [True, False])
    def test_any_ids_can_be_decoded_while_they_grow(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        random = Random(0)
        bytes_of = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
        kinds = [
            [*bytes_of, tokenizer.vocab_size + 1000],
            [i for i, data in bytes_of.items() if data is not None and data.decode(errors="ignore").encode() != data],
            [i for i, data in bytes_of.items() if data is not None and len(data) == 1] + [0],
            sorted(tokenizer.special_ids)[:3] + [i for i, data in bytes_of.items() if data][:3],
        ]
        for _ in range(100):
            kind = random.choice([kind for kind in kinds if kind])
            check_stream(tokenizer, [random.choice(kind) for _ in range(random.randint(1, 50))], skip_special_tokens)

    def test_it_works_from_many_threads(self, tokenizer: Tokenizer) -> None:
        expected = [tokenizer.encode(text) for text in TEXTS]

        def work(_: int) -> bool:
            ids = [tokenizer.encode(text) for text in TEXTS]
            texts = [tokenizer.decode(tokens) for tokens in ids]
            return ids == expected and texts == [tokenizer.decode(tokens) for tokens in expected]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(32)))

    def test_a_chat_template_is_rendered_and_encoded(self, tokenizer: Tokenizer) -> None:
        messages = [{"role": "user", "content": "Hello, world!"}]
        ids = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE)
        assert ids == tokenizer.encode("user: Hello, world!\nassistant:", add_special_tokens=False)
        without = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, add_generation_prompt=False)
        assert without == tokenizer.encode("user: Hello, world!\n", add_special_tokens=False)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello, world!"}]}]
        assert tokenizer.apply_chat_template(parts, chat_template=TEMPLATE) == ids
        assert messages == [{"role": "user", "content": "Hello, world!"}]

    def test_variables_and_tools_reach_the_template(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}],
            tools=[{"name": "weather"}],
            chat_template="{{ tools[0].name }} {{ mood }}",
            mood="sunny",
        )
        assert ids == tokenizer.encode("weather sunny", add_special_tokens=False)

    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('roles must alternate') }}",
            "{% for i in range(10 ** 9) %}x{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{{ 'x' * 10 ** 10 }}",
            "{{ messages.__class__.__mro__ }}",
            "{% if %}",
            "{{ messages[0].content + 1 }}",
        ],
    )
    def test_a_template_that_fails_or_does_too_much_is_refused(self, tokenizer: Tokenizer, template: str) -> None:
        with pytest.raises(ChatTemplateError):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=template)

    @pytest.mark.parametrize(
        "messages",
        ["text", [], None, {"role": "user", "content": "x"}, ["x"], [{"content": "x"}], [{"role": 1, "content": "x"}],
         [{"role": "user"}], [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "image_url"}]}]],
    )  # fmt: skip
    def test_bad_messages_are_refused(self, tokenizer: Tokenizer, messages: object) -> None:
        with pytest.raises(ChatTemplateError):
            tokenizer.apply_chat_template(messages, chat_template=TEMPLATE)  # type: ignore[arg-type]

    def test_it_imports_no_torch(self) -> None:
        module = type(self.make()).__module__
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
