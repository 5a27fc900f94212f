"""BPE tokenizers of any size, byte-level or with byte fallback, made without training data: the same bytes on every machine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import ascii_letters, ascii_lowercase, digits, punctuation

EOS, BOS, IM_START, IM_END = 0, 1, 2, 3
SPECIAL_TOKENS = ("<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORDS = (  # noqa: SIM905 - a list of words reads worse
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then them these "
    "so some her would make like him into time has look two more write go see number no way could people my than first water "
    "been call who oil its now find long down day did get come made may part over new sound take only little work know place "
    "year live me back give most very after thing our just name good sentence man think say great where help through much "
    "before line right too mean old any same tell boy follow came want show also around form three small set put end does "
    "another well large must big even such because turn here why ask went men read need land different home us move try kind "
    "hand picture again change off play spell air away animal house point page letter mother answer found study still learn "
    "should America world capital France Paris"
).split()


def write_tokenizer(
    folder: str | Path,
    *,
    size: int = 1000,
    bos: bool = False,
    byte_fallback: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
) -> None:
    """Write tokenizer.json and tokenizer_config.json of ``size`` tokens; ``bos``: encoding puts the BOS token in front.

    The kind is byte-level BPE, from 260 tokens up. ``byte_fallback``: one as converted from SentencePiece, from 355 tokens up:
    "▁" stands for a space, one is put before each text, and what is not ASCII comes in tokens of single bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    folder = Path(folder)
    space = "▁" if byte_fallback else "Ġ"  # how each kind spells a leading space
    vocab, merges = _vocabulary(_byte_tokens() if byte_fallback else sorted(pre_tokenizers.ByteLevel.alphabet()), space, size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=byte_fallback))
    if byte_fallback:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL_TOKENS[BOS]} $A",
            pair=f"{SPECIAL_TOKENS[BOS]} $A {SPECIAL_TOKENS[BOS]} $B",
            special_tokens=[(SPECIAL_TOKENS[BOS], BOS)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "add_bos_token": bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _byte_tokens() -> list[str]:
    """A token for each byte, and one for each printable character of ASCII."""
    return [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *ascii_letters, *digits, *punctuation]


def _vocabulary(single: Iterable[str], space: str, size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens, the ``single`` bytes or characters, then prefixes of common words (each with a leading space), then pairs
    of characters."""
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *single))}
    smallest = len(vocab)
    merges = []
    for left, right in _merges(space):
        if len(vocab) >= size:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    if len(vocab) != size:
        raise ValueError(f"tokenizer size {size} is outside the possible range, {smallest} to about {len(vocab)}")
    return vocab, merges


def _merges(space: str) -> Iterator[tuple[str, str]]:
    for word in _WORDS:
        text = space + word
        for i in range(1, len(text)):
            yield text[:i], text[i]
    yield from itertools.product(ascii_lowercase + digits, repeat=2)
    yield from ((space, character) for character in digits)
