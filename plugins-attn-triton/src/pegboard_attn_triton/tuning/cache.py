"""Sizes that were measured on a device, in a file per device and version of triton.

The file lies in ``$XDG_CACHE_HOME/pegboard/attn-triton`` (``~/.cache`` by default). It is replaced as a whole, so readers see an
old or a new one; a file that cannot be read is left out of account, with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pegboard_attn_triton.tuning.config import SMALLEST_TILE, KernelConfig, Problem

log = logging.getLogger(__name__)


class TuningCache:
    """``get`` and ``put`` by problem."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_device(cls, device_name: str) -> TuningCache:
        """The file of a device, by its name, and of the triton that is installed."""
        name = re.sub(r"[^A-Za-z0-9.]+", "_", f"{device_name} triton {version('triton')}").strip("_")
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(Path(root) / "pegboard" / "attn-triton" / f"{name}.json")

    def get(self, problem: Problem) -> KernelConfig | None:
        return self._read().get(problem.key)

    def put(self, problem: Problem, config: KernelConfig) -> None:
        """Keep ``config``, beside what the file already holds."""
        content = {key: asdict(kept) for key, kept in self._read().items()} | {problem.key: asdict(config)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=1, sort_keys=True)
            os.replace(temporary, self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _read(self) -> dict[str, KernelConfig]:
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read, and the shipped sizes are used: %s", self.path, error)
            return {}
        try:
            return {key: _config(value) for key, value in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("%s holds no sizes of kernels, and the shipped ones are used; delete it: %s", self.path, error)
            return {}


def _config(value: Any) -> KernelConfig:
    config = KernelConfig(**value)
    fields = asdict(config)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in fields.values()):
        raise ValueError(f"{fields} are not whole numbers")
    powers = (config.block_n, config.num_warps, config.block_m or 1)
    if any(size < 1 or size & (size - 1) for size in powers) or config.num_stages < 1 or config.block_n < SMALLEST_TILE:
        raise ValueError(f"{fields} are no sizes of a kernel")
    return config
