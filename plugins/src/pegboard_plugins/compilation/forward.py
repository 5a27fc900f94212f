"""A model's forward, compiled by torch.compile."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pegboard.contracts.communicator import Communicator
from pegboard.contracts.model import Model
from pegboard_plugins.layers import attention

log = logging.getLogger(__name__)

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that names the folder of torch's compiler. What a user has set stays."""
_BACKEND = "inductor"
_VARIANTS = 64
"""Of one function: three for each kind of layer and type of numbers that a process has. More are an error, because torch would
go on without compiling and without a word."""
REMEDY = "compilation.torch_compile=false does without"


class CompilationError(RuntimeError):
    """A model cannot be compiled. The message says why and what to do."""


class LeftOut:
    """A communicator's collectives, which compiled code calls as they are."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.all_reduce = torch._dynamo.disable(communicator.all_reduce)
        self.all_gather = torch._dynamo.disable(communicator.all_gather)


class CompiledForward:
    """``Model.forward``, compiled when it is first called, again for another number of tokens, which is then a variable, and for
    one token. Attention and collectives are called from between the compiled parts: each layer is compiled up to its attention
    and from there on, and all layers of one kind share the code."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._forward = torch.compile(model.forward, backend=_BACKEND)
        self._name, self._folder = type(model).__name__, folder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        limits = torch._dynamo.config.patch(recompile_limit=_VARIANTS, fail_on_recompile_limit_hit=True)
        with _code_in(self._folder), limits:
            try:
                return self._forward(*args, **kwargs)
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise CompilationError(f"{self._name} could not be compiled: {lines[0]}; {REMEDY}") from error


def compile_forward(model: Model, folder: Path, device: torch.device) -> None:
    """Replace ``model.forward``. Raises ``CompilationError`` for a model that does not say that it can be compiled, without the
    compiler that the device needs, and where code cannot be kept."""
    if not model.capturable:
        raise CompilationError(
            f"{type(model).__name__} does not say that its forward can be compiled (capturable is false); {REMEDY}"
        )
    _check_named_folder()
    if device.type == "cpu":
        _find_compiler()
    attention.leave_out_of_compilation()
    model.forward = CompiledForward(model, folder)  # type: ignore[method-assign]
    log.info("the forward of %s will be compiled; code is kept in %s", type(model).__name__, folder)


def _check_named_folder() -> None:
    """The user's own; torch's compiler cannot even be imported where it cannot be made."""
    named = os.environ.get(_FOLDER)
    try:
        if named:
            os.makedirs(named, exist_ok=True)
    except OSError as error:
        raise CompilationError(
            f"compiled code cannot be kept in {named}, which the environment variable {_FOLDER} names: {error}; name another "
            f"place there; {REMEDY}"
        ) from error


def _find_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise CompilationError(
            "compilation.torch_compile on a cpu needs a C++ compiler, and there is none: install g++ or clang++, or name one in "
            f"the environment variable CXX; {REMEDY}"
        ) from error


@contextlib.contextmanager
def _code_in(folder: Path) -> Iterator[None]:
    """Compiled code comes from and goes to ``folder`` meanwhile, unless the user has named another one. (torch puts its default
    into the environment when it first needs a folder.)"""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    before = os.environ.get(_FOLDER)
    if before is not None and before != default_cache_dir():
        yield
        return
    os.environ[_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before
