"""Pre-tokenizers by the names that GGUF files give them (``tokenizer.ggml.pre``): where text is cut before merges apply.

As llama.cpp does it, which gave the names, and as the models' own tokenizer.json do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

log = logging.getLogger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
_TEKKEN = rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+|{_LEAD}[{_UPPER}]+[{_LOWER}]*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_GPT4O = (
    rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|{_LEAD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """``pattern``: text is cut into its matches; None for GPT-2's. ``digits``: each digit is a piece of its own before that.
    ``whole_words``: a piece that is a token stays whole even if no merges lead to it. ``add_bos``: what holds for a file that
    does not say."""

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """Also maps bytes to the characters that byte-level vocabularies are spelled in."""
        from tokenizers import Regex, pre_tokenizers

        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        if self.pattern is not None:
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"), byte_level])
        if self.digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        return byte_level


_GPT2 = PreTokenization()

_BY_NAME: dict[PreTokenization, str] = {
    _GPT2: "default gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de jina-v1-en jina-v2-es jina-v2-de",
    PreTokenization(digits=True): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum",
    PreTokenization(_LLAMA3, whole_words=True, add_bos=True): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenization(_LLAMA3): "dbrx smaug-bpe chatglm-bpe",
    PreTokenization(_QWEN2): "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan",
    PreTokenization(_QWEN35): "qwen35",
    PreTokenization(_TEKKEN, whole_words=True, add_bos=True): "tekken",
    PreTokenization(_GPT4O): "gpt-4o llama4 kanana2",
}
PRE_TOKENIZERS = {name: kind for kind, names in _BY_NAME.items() for name in names.split()}


def pre_tokenization(name: str | None, path: str) -> PreTokenization:
    """The one named, or GPT-2's with a warning: nearly right for any byte-level vocabulary, but not what the model learned."""
    found = PRE_TOKENIZERS.get(name) if name is not None else None
    if found is None:
        what = "names no pre-tokenizer" if name is None else f"names the unknown pre-tokenizer {name!r}"
        log.warning("%s %s; GPT-2's is used, which may split words differently than the model expects", path, what)
        return _GPT2
    return found
