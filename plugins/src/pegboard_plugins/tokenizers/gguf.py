"""GGUFTokenizer: the tokenizer inside a GGUF file's metadata."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.contracts.model_source import ModelNotFound, ModelSource
from pegboard.contracts.weight_loader import WeightsError
from pegboard_plugins.loaders.gguf_metadata import GGUFFile, read_gguf
from pegboard_plugins.tokenizers.backend import BackendTokenizer, Parts
from pegboard_plugins.tokenizers.gguf_pre import pre_tokenization
from pegboard_plugins.tokenizers.gguf_sentencepiece import sentencepiece_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of GGUF."""
SEPARATE = "give a tokenizer of its own with the tokenizer option: a folder with tokenizer.json, or a hub id"

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BYTES = re.compile("[!-~¡-¬®-ÿĀ-Ń]*")
"""The characters that byte-level vocabularies spell bytes with."""


class GGUFTokenizer(BackendTokenizer):
    """Byte-level BPE ("gpt2" with its pre-tokenizers) and SentencePiece BPE ("llama").

    A file without an end-of-text id has ``eos_token_id`` None; one without a chat template takes it from the option. Tokens
    at the end of the vocabulary that are marked unused only pad it and do not exist here, as in the model's original tokenizer.
    """

    def __init__(self, source: ModelSource, config: Any = None) -> None:
        """Raises ``ModelNotFound`` naming the file and what its metadata lack."""
        path = source.tokenizer_path or source.path
        try:
            file = read_gguf(path)
        except WeightsError as error:
            raise ModelNotFound(str(error)) from error
        super().__init__(_parts(file), getattr(config, "chat_template", None))


def _parts(file: GGUFFile) -> Parts:
    vocabulary = _Vocabulary(file)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        pre = pre_tokenization(vocabulary.get("pre"), file.path)
        backend = _byte_level_backend(vocabulary, pre.whole_words)
        backend.pre_tokenizer = pre.build()
        add_bos = pre.add_bos
    elif kind == "llama":
        scores, merges = vocabulary.get("scores"), vocabulary.get("merges")
        if scores is None and merges is None:
            raise ModelNotFound(f"{file.path}: the metadata has neither tokenizer.ggml.scores nor .merges; {SEPARATE}")
        backend = sentencepiece_backend(
            vocabulary.tokens,
            scores=scores,
            merges=None if merges is None else _pairs(merges),
            skip=[i for i, kind in enumerate(vocabulary.types) if kind in (UNKNOWN, CONTROL, BYTE)],
            unknown=vocabulary.named.get("unk_token"),
            space_prefix=bool(vocabulary.get("add_space_prefix", True)),
        )
        add_bos = True
    else:
        known = (
            "it has no tokenizer.ggml.model"
            if kind is None
            else f"tokenizer.ggml.model is {kind!r}, supported are 'gpt2' and 'llama'"
        )
        raise ModelNotFound(f"{file.path}: no tokenizer can be made from the metadata: {known}; {SEPARATE}")
    _add_tokens(backend, vocabulary)
    return Parts(
        backend,
        special_tokens={name: vocabulary.tokens[token_id] for name, token_id in vocabulary.named.items()},
        chat_templates=_chat_templates(file.metadata),
        prefix=vocabulary.added("bos_token", add_bos),
        suffix=vocabulary.added("eos_token", False),
    )


class _Vocabulary:
    """The lists and ids under ``tokenizer.ggml``, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise ModelNotFound(f"{file.path}: no tokenizer can be made: the metadata has no tokenizer.ggml.tokens; {SEPARATE}")
        types = self.get("token_type")
        types = [NORMAL] * len(tokens) if types is None else types
        self._check_length("token_type", types, len(tokens))
        if self.get("scores") is not None:
            self._check_length("scores", self.get("scores"), len(tokens))
        size = len(tokens)
        while size > 1 and types[size - 1] == UNUSED:
            size -= 1
        self.tokens: list[str] = tokens[:size]
        self.types: list[int] = types[:size]
        self.named = dict(self._named_ids())

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}", default)

    def _check_length(self, key: str, values: Sequence[Any], expected: int) -> None:
        if len(values) != expected:
            raise ModelNotFound(
                f"{self._file.path}: tokenizer.ggml.{key} has {len(values)} items for {expected} tokens; {SEPARATE}"
            )

    def _named_ids(self) -> Iterable[tuple[str, int]]:
        """Ids of the special tokens. SentencePiece vocabularies that do not say have them at the front."""
        usual = {"unknown": 0, "bos": 1, "eos": 2} if self.get("model") == "llama" else {}
        for name, key in _NAMED.items():
            token_id = self.get(f"{key}_token_id")
            if token_id is None:
                token_id = usual.get(key)
                if token_id is None or token_id >= len(self.tokens) or self.types[token_id] not in (UNKNOWN, CONTROL):
                    continue
            if 0 <= token_id < len(self.tokens):
                yield name, token_id
            else:
                log.warning(
                    "%s: %s_token_id is %d, outside the vocabulary of %d; ignored",
                    self._file.path,
                    key,
                    token_id,
                    len(self.tokens),
                )

    def added(self, name: str, default: bool) -> tuple[int, ...]:
        """The id that goes around each prompt, if the file (or else the default) says so and has one."""
        wanted = self.get(f"add_{name}", default)
        return (self.named[name],) if wanted and name in self.named else ()


def _byte_level_backend(vocabulary: _Vocabulary, whole_words: bool) -> Backend:
    from tokenizers import Tokenizer, decoders, models

    merges = vocabulary.get("merges")
    if merges is None:
        raise ModelNotFound(f"{vocabulary._file.path}: the metadata has no tokenizer.ggml.merges; {SEPARATE}")
    vocab = {
        token if kind != NORMAL or _BYTES.fullmatch(token) else _spelled(token): token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    }
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=_pairs(merges), ignore_merges=whole_words))
    except Exception as error:  # the library raises Exception itself, for merges of pieces that are no tokens
        raise ModelNotFound(f"{vocabulary._file.path}: its merges do not fit its tokens: {error}; {SEPARATE}") from error
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs written with one space between. A first half may itself start with one."""
    cuts = (merge.find(" ", 1) for merge in merges)
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _spelled(token: str) -> str:
    """A token that the file has as plain text, in the characters that stand for its bytes."""
    from tokenizers import pre_tokenizers

    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(token)
    return "".join(piece for piece, _ in pieces)


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Tokens that are found in text before it is cut: control tokens, and those that the model's makers defined."""
    from tokenizers import AddedToken

    named = set(vocabulary.named.values())
    special, plain = [], []
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (UNKNOWN, CONTROL) or token_id in named:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The default template and the named ones (``tokenizer.chat_template.<name>``)."""
    prefix = "tokenizer.chat_template"
    found = {key.removeprefix(prefix).lstrip(".") or "default": text for key, text in metadata.items() if key.startswith(prefix)}
    return {name: text for name, text in found.items() if isinstance(text, str)}
