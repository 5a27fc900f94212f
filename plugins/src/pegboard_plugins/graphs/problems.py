"""What keeps a worker from having graphs."""

from __future__ import annotations

from collections.abc import Iterator

from pegboard.config import CompilationConfig
from pegboard.contracts.graph_runner import GraphTarget
from pegboard.contracts.platform import DeviceGraphs


def graph_problems(
    settings: CompilationConfig, target: GraphTarget, platform: str, pool: DeviceGraphs | None, sizes: list[int]
) -> Iterator[str]:
    """Every reason, for whoever wonders why steps are slow."""
    if settings.enforce_eager:
        yield "compilation.enforce_eager is true"
    if not sizes:
        yield f"compilation.capture_sizes has nothing up to the {target.max_rows} rows that a step may have"
    if pool is None:
        yield f"platform {platform!r} has no graphs"
    for name in dict.fromkeys(backend.name for backend in target.backends if backend.graph_support == "never"):
        yield f"attention backend {name!r} cannot be captured (graph_support is 'never')"
    if not target.model.capturable:
        yield f"{type(target.model).__name__} does not say that its forward can be captured (capturable is false)"
    if target.communicator is not None and not target.communicator.capturable:
        yield (
            f"{type(target.communicator).__name__}, over which ranks share layers, cannot be captured (capturable is false); "
            "another one may be named with executor.communicator"
        )
    for name, extension in target.extensions.items():
        if not extension.capturable:
            yield f"worker extension {name!r} looks inside of forward (capturable is false)"
