"""What the hooks of a worker are told. Those of the engine get ``pegboard.engine.info.EngineInfo``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.config import EngineConfig
    from pegboard.plugins.composition import Composition
    from pegboard.wire import World


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker, in its own process where the executor gives it one. ``world`` holds its rank and the group sizes."""

    config: EngineConfig
    composition: Composition
    world: World
