"""Model files from the Hugging Face hub, or from its local cache when offline. Imports huggingface_hub when asked for one."""

from __future__ import annotations

import os
import re

from pegboard.contracts.model_source import ModelNotFound

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.jinja",
)  # fmt: skip
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES)
_DUPLICATES = ("original/*", "consolidated*", "*/*.safetensors")
"""The same weights once more, in the layout of another program."""

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)", re.IGNORECASE)


def is_hub_id(ref: str) -> bool:
    """``organisation/name``, as the hub writes it."""
    return _REPOSITORY.fullmatch(ref) is not None and not ref.startswith(".")


def hub_file(ref: str) -> tuple[str, str] | None:
    """Repository and file of ``organisation/name/file.gguf``; None if ``ref`` is no such thing."""
    match = _FILE.fullmatch(ref)
    return (match[1], match[2]) if match and not ref.startswith(".") else None


def download(repository: str, patterns: tuple[str, ...]) -> str:
    """Folder with the repository's files that match. What is cached is not fetched again; offline the cache alone is used.

    Raises ``ModelNotFound`` saying whether the repository is unknown, needs access, or could not be reached.
    """
    from huggingface_hub import snapshot_download

    with _Translated(repository):
        return str(snapshot_download(repository, allow_patterns=list(patterns), ignore_patterns=list(_DUPLICATES)))


def download_file(repository: str, name: str) -> str:
    """Path of one file of a repository, fetched or cached. Raises as ``download``."""
    path = os.path.join(download(repository, (name,)), name)
    if not os.path.isfile(path):
        raise ModelNotFound(f"{repository!r} on the Hugging Face hub has no file {name!r}")
    return path


class _Translated:
    """Turns the hub library's errors into ``ModelNotFound`` with the remedy."""

    def __init__(self, repository: str) -> None:
        self.repository = repository

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise ModelNotFound(self._message(error)) from error

    def _message(self, error: Exception) -> str:
        from huggingface_hub import constants, errors

        name = self.repository
        start = f"{name!r} is neither a local folder or file nor"
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{name!r} on the Hugging Face hub needs access: ask for it on its page, then run 'hf auth login' or set HF_TOKEN"
            )
        if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face hub cannot be reached"
            return (
                f"{start} complete in the cache {constants.HF_HUB_CACHE}, and {why}. "
                "Download it where there is a network ('hf download'), or give the path of a local model"
            )
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return f"{start} a model on the Hugging Face hub (a private one needs 'hf auth login' or HF_TOKEN)"
        return f"{name!r} could not be fetched from the Hugging Face hub: {type(error).__name__}: {error}"
