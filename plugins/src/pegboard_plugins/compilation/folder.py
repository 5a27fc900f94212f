"""Where compiled code is kept: a folder for everything that the code depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pegboard.wire import World
from pegboard_plugins.compilation.forward import REMEDY, CompilationError
from pegboard_plugins.loaders.packaged import cache_folder

if TYPE_CHECKING:
    from pegboard.plugins import Composition


def key_parts(composition: Composition, world: World, dtype: str, device: torch.device) -> dict[str, Any]:
    """What code depends on besides the operations themselves, which the compiler looks at; plain enough for JSON."""
    told = composition.host.hook.compile_cache_key(config=composition.config)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": _device_name(device),
        "dtype": dtype,
        "ranks": [world.tp_size, world.pp_size],
        "model": {"provider": composition.parts["model"].name, "spec": dataclasses.asdict(composition.spec)},
        "plugins": sorted(f"{entry.name} {entry.distribution} {entry.version}" for entry in composition.manifest.plugins),
        "told by plugins": sorted(told),
    }


def code_folder(parts: dict[str, Any]) -> Path:
    """Made if it is not there, with ``key.json`` that says what it is for. Any number of processes may share it: the compiler
    puts whole files in place, and so does this. Raises ``CompilationError`` where it cannot be written."""
    text = json.dumps(parts, indent=1, sort_keys=True, default=repr)
    folder = cache_folder() / "compiled" / hashlib.sha256(text.encode()).hexdigest()[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _put(folder / "key.json", text)
    except OSError as error:
        raise CompilationError(
            f"compiled code cannot be kept in {folder}: {error}; name another place in the environment variable XDG_CACHE_HOME; "
            f"{REMEDY}"
        ) from error
    return folder


def _put(note: Path, text: str) -> None:
    """The whole file, if there is none."""
    if note.exists():
        return
    handle, temporary = tempfile.mkstemp(dir=note.parent, prefix="key-")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, note)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {torch.version.cuda}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
