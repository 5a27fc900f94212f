"""HFTokenizer: tokenizer.json, with what tokenizer_config.json and its companions add."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.contracts.model_source import ModelNotFound, ModelSource
from pegboard_plugins.loaders.json_files import read_object
from pegboard_plugins.tokenizers.backend import BackendTokenizer, Parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger(__name__)

_OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken", "*.spm", "spiece.model")
"""What tokenizers without a tokenizer.json are kept in; transformers converts most of them."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class HFTokenizer(BackendTokenizer):
    """Reads a folder as Hugging Face's libraries write it.

    What goes around a prompt is tokenizer.json's own business (its post-processor); ``add_bos_token`` and ``add_eos_token`` of
    tokenizer_config.json are for libraries that build a tokenizer without it, as in transformers.
    """

    def __init__(self, source: ModelSource, config: Any = None) -> None:
        """Raises ``ModelNotFound`` naming the folder and what it lacks."""
        folder = Path(source.tokenizer_path or source.path)
        super().__init__(_parts(folder), getattr(config, "chat_template", None))


def _parts(folder: Path) -> Parts:
    settings = _settings(folder)
    backend = _backend(folder)
    special = _special_tokens(settings)
    _add_tokens(backend, settings, special)
    known = {name: token for name, token in special.items() if backend.token_to_id(token) is not None}
    return Parts(backend, known, _chat_templates(folder, settings))


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed by special_tokens_map.json."""
    settings = read_object(folder / "tokenizer_config.json", missing={})
    for key, value in read_object(folder / "special_tokens_map.json", missing={}).items():
        if settings.get(key) is None:
            settings[key] = value
    return settings


def _backend(folder: Path) -> Backend:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return _converted(folder)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ModelNotFound(f"{path}: is no tokenizer that the tokenizers library can read: {error}") from error


def _converted(folder: Path) -> Backend:
    """From older files, with transformers if it is installed."""
    found = sorted({file.name for pattern in _OLDER_FILES for file in folder.glob(pattern)})
    if not found:
        raise ModelNotFound(
            f"{folder}: holds no tokenizer (looked for tokenizer.json, {', '.join(_OLDER_FILES)}); "
            "give one with the tokenizer option: a folder or a hub id"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelNotFound(
            f"{folder}: has {', '.join(found)} but no tokenizer.json; converting them needs transformers: "
            "pip install 'pegboard-plugins[transformers]' sentencepiece"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend: Backend | None = getattr(converted, "backend_tokenizer", None)
    except Exception as error:
        raise ModelNotFound(f"{folder}: transformers cannot convert {', '.join(found)}: {error}") from error
    if backend is None:
        raise ModelNotFound(f"{folder}: transformers has no fast tokenizer for {', '.join(found)}; give one with tokenizer.json")
    return backend


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` … to their texts; each may be kept as a text or as an object with ``content``."""
    found = {}
    for name in _NAMED:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _add_tokens(backend: Backend, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json has, at the ids it gives them; and the named ones become special."""
    from tokenizers import AddedToken

    decoder = settings.get("added_tokens_decoder") or {}
    for token_id, entry in sorted((int(number), entry) for number, entry in decoder.items()):
        if backend.token_to_id(entry["content"]) is not None:
            continue
        if token_id != backend.get_vocab_size(with_added_tokens=True):
            log.warning(
                "tokenizer_config.json: added token %r has the id %d, which does not follow on; ignored",
                entry["content"],
                token_id,
            )
            continue
        flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in entry}
        backend.add_tokens([AddedToken(entry["content"], **flags)])
    for name, token in special.items():
        if backend.token_to_id(token) is None:
            log.warning("tokenizer_config.json: %s %r is not in the vocabulary; ignored", name, token)
        elif not _is_special(backend, token):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def _is_special(backend: Backend, token: str) -> bool:
    return any(added.special and added.content == token for added in backend.get_added_tokens_decoder().values())


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name. Files of their own replace what tokenizer_config.json holds."""
    found: dict[str, str] = {}
    for stored in (settings.get("chat_template"), read_object(folder / "chat_template.json", missing={}).get("chat_template")):
        if isinstance(stored, str):
            found["default"] = stored
        elif isinstance(stored, list):
            found |= {entry["name"]: entry["template"] for entry in stored}
        elif isinstance(stored, Mapping):
            found |= stored
    files = [("default", folder / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, path in files:
        if path.is_file():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelNotFound(f"{path}: cannot be read: {error}") from error
    return found
