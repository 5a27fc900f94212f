"""HFTokenizer: what each file of a folder contributes, and equality with transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.model_source import ModelNotFound, ModelSource
from pegboard.contracts.tokenizer import ChatTemplateError
from pegboard.testing.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer
from pegboard_plugins.tokenizers.hf import HFTokenizer

MESSAGES = [{"role": "user", "content": "the world"}]
TEXTS = ("the capital of France", "<|im_start|>user\nhello<|im_end|>\n", "  two  words\n\n12", "日本 🙂", "")


def load(folder: Path, config: EngineConfig | None = None) -> HFTokenizer:
    return HFTokenizer(ModelSource("model", str(folder), "safetensors", "hf", {}), config)


@pytest.fixture
def change(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny tokenizer with changed settings (``...`` removes one) and gives its folder."""

    def change(*, bos: bool = False, **settings: Any) -> Path:
        write_tokenizer(tmp_path, size=1000, bos=bos)
        path = tmp_path / "tokenizer_config.json"
        found = json.loads(path.read_text()) | settings
        path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))
        return tmp_path

    return change


def test_the_tokenizer_path_goes_before_the_models_own(tmp_path: Path, change: Callable[..., Path]) -> None:
    source = ModelSource("m", "/nowhere", "gguf", "hf", {}, tokenizer_path=str(change()))
    assert HFTokenizer(source).vocab_size == 1000


@pytest.mark.parametrize("flag", [True, False, ...])
@pytest.mark.parametrize(("post_processor", "expected"), [(True, [1]), (False, [])])
def test_bos_is_added_as_tokenizer_json_says(
    change: Callable[..., Path], post_processor: bool, flag: Any, expected: list[int]
) -> None:
    tokenizer = load(change(bos=post_processor, add_bos_token=flag))
    assert tokenizer.encode("the world") == [*expected, *tokenizer.encode("the world", add_special_tokens=False)]


def test_half_of_a_surrogate_pair_is_no_text(change: Callable[..., Path]) -> None:
    """It comes out of JSON, which can spell it."""
    tokenizer = load(change(chat_template=CHAT_TEMPLATE))
    with pytest.raises(ValueError, match=r"the text has '\\ud800' at place 2: half of a surrogate pair"):
        tokenizer.encode("ab\ud800c")
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        tokenizer.apply_chat_template([{"role": "user", "content": json.loads('"\\udfff"')}])
    with pytest.raises(TypeError):
        tokenizer.encode(5)  # type: ignore[arg-type]


def test_special_tokens_come_from_either_file(tmp_path: Path, change: Callable[..., Path]) -> None:
    folder = change(eos_token=..., bos_token={"content": "<|begin|>", "special": True})
    assert load(folder).eos_token_id is None
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"})
    )
    tokenizer = load(folder, EngineConfig(model="x", chat_template="{{ bos_token }}"))
    assert tokenizer.eos_token_id == 3
    assert tokenizer.apply_chat_template(MESSAGES) == [1]


def test_a_named_token_becomes_special(change: Callable[..., Path]) -> None:
    tokenizer = load(change(eos_token="Ġthe"))
    assert tokenizer.eos_token_id in tokenizer.special_ids


def test_a_named_token_that_is_no_token_is_ignored_with_a_warning(
    change: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load(change(eos_token="<absent>"))
    assert tokenizer.eos_token_id is None
    assert tokenizer.vocab_size == 1000
    assert "eos_token '<absent>' is not in the vocabulary" in caplog.text


def test_added_tokens_of_the_config_keep_their_ids(change: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    added = {"1000": {"content": "<tool>", "special": True}, "1001": {"content": "<think>"}, "2000": {"content": "<far>"}}
    tokenizer = load(change(added_tokens_decoder=added))
    assert tokenizer.encode("<tool><think>") == [1000, 1001]
    assert tokenizer.decode([1000, 1001]) == "<think>"
    assert tokenizer.vocab_size == 1002
    assert "'<far>' has the id 2000, which does not follow on" in caplog.text


def test_truncation_and_padding_kept_in_the_file_are_not_applied(change: Callable[..., Path]) -> None:
    folder = change()
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                       "pad_token": "<|endoftext|>"}  # fmt: skip
    path.write_text(json.dumps(spec))
    assert len(load(folder).encode("the world of the capital")) == 7


def test_templates_are_found_where_libraries_write_them(change: Callable[..., Path]) -> None:
    folder = change(chat_template=...)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load(folder).apply_chat_template(MESSAGES)
    for stored in (
        "one",
        [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools"}],
        {"default": "one"},
    ):
        tokenizer = load(change(chat_template=stored))
        assert tokenizer.chat_templates.render(MESSAGES) == "one"
        if isinstance(stored, list):
            assert tokenizer.chat_templates.render(MESSAGES, tools=[{"name": "f"}]) == "tools"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "two"}))
    assert load(folder).chat_templates.render(MESSAGES) == "two"
    (folder / "chat_template.jinja").write_text("three")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("four")
    tokenizer = load(folder)
    assert tokenizer.chat_templates.render(MESSAGES) == "three"
    assert tokenizer.chat_templates.render(MESSAGES, chat_template="rag") == "four"


def test_the_option_is_checked_at_start(change: Callable[..., Path]) -> None:
    with pytest.raises(ChatTemplateError, match="mistake in line 1"):
        load(change(), EngineConfig(model="x", chat_template="{% if %}"))


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no tokenizer \(looked for tokenizer.json, tokenizer.model.*tokenizer option"):
        load(tmp_path)


def test_older_files_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelNotFound, match=r"has tokenizer.model but no tokenizer.json; .*pip install"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_broken_files_are_named(change: Callable[..., Path], name: str) -> None:
    folder = change()
    (folder / name).write_text("{")
    with pytest.raises(ModelNotFound, match=name):
        load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("flag", [True, False, ...])
def test_ids_are_those_of_transformers(change: Callable[..., Path], post_processor: bool, flag: Any) -> None:
    from transformers import AutoTokenizer

    folder = change(bos=post_processor, add_bos_token=flag)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.chat_templates.render(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )


@pytest.mark.slow
def test_older_files_are_converted_by_transformers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, size=1000)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    expected = load(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in spec["model"]["merges"]))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|begin|>",
        "eos_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").unlink()
    found = load(tmp_path)
    assert found.encode("the capital of France 12") == expected.encode("the capital of France 12")
    assert found.eos_token_id == 0
    (tmp_path / "merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelNotFound, match=r"transformers cannot convert vocab\.json"):
        load(tmp_path)
