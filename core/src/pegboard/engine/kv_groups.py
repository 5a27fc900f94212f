"""Which attention layers share a block table.

A block belongs to one group of layers, and every group draws from one pool; so a block takes the same bytes whichever group has
it: those of as many layers as the largest group has. Layers are cut into groups by what they store and how far they look back,
and groups are made as large as little waste allows: fewer block tables for workers to read, and fewer blocks to keep account of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from pegboard.engine.errors import EngineStartError
from pegboard.wire import KVCacheGroup, KVCacheSpec

MAX_WASTE: Final = 0.1
"""Share of the blocks of one kind of layers that may stay empty, because kinds do not divide into groups of one size."""

Specs = Mapping[str, KVCacheSpec]


def group_layers(specs: Sequence[Specs], max_model_len: int) -> list[KVCacheGroup]:
    """The groups on which all ranks agree; ``specs`` are in rank order. One group where all layers are alike; otherwise in the
    order of their first layers. Of a pipeline, every stage has its part of each group.

    Raises:
        EngineStartError: ranks disagree on a layer, there is none, or the layers of two kinds take different bytes.
    """
    stages = [{name: _seen(spec, max_model_len) for name, spec in stage.items()} for stage in _stages(specs)]
    kinds = list(dict.fromkeys(spec for stage in stages for spec in stage.values()))
    if not kinds:
        raise EngineStartError("no worker has an attention layer, so there is no KV cache to manage")
    _check_bytes(stages, kinds)
    by_kind = [[[name for name, spec in stage.items() if spec == kind] for stage in stages] for kind in kinds]
    numbers = _numbers_of_groups([[len(names) for names in kind] for kind in by_kind])
    groups = [
        KVCacheGroup(layers=[name for names in by_stage for name in _part(names, i, number)], spec=kind)
        for kind, by_stage, number in zip(kinds, by_kind, numbers, strict=True)
        for i in range(number)
    ]
    order = {name: i for i, name in enumerate(name for stage in stages for name in stage)}
    return sorted(groups, key=lambda group: min(order[name] for name in group.layers))


def block_bytes(groups: Iterable[KVCacheGroup], specs: Specs) -> int:
    """Bytes of one block on the rank that stores ``specs``; 0 where it has no layer."""
    own = [[specs[name].block_bytes for name in group.layers if name in specs] for group in groups]
    return max((sum(sizes) for sizes in own), default=0)


def _stages(specs: Sequence[Specs]) -> list[dict[str, KVCacheSpec]]:
    """The layers of each pipeline stage, once. Ranks that have layers in common are of one stage."""
    stages: list[dict[str, KVCacheSpec]] = []
    home: dict[str, dict[str, KVCacheSpec]] = {}
    for rank, rank_specs in enumerate(specs):
        found = next((home[name] for name in rank_specs if name in home), None)
        if found is None:
            stages.append(found := {})
        for name, spec in rank_specs.items():
            if found.setdefault(name, spec) != spec:
                raise EngineStartError(f"rank {rank} stores {spec} for layer {name!r}, another rank {found[name]}")
            home[name] = found
    return stages


def _seen(spec: KVCacheSpec, max_model_len: int) -> KVCacheSpec:
    """A window as long as the longest request is none."""
    window = spec.sliding_window
    return replace(spec, sliding_window=None) if window is not None and window >= max_model_len else spec


def _check_bytes(stages: Sequence[Specs], kinds: Sequence[KVCacheSpec]) -> None:
    sizes: dict[int, str] = {}
    for name, spec in ((name, spec) for stage in stages for name, spec in stage.items()):
        sizes.setdefault(spec.block_bytes, name)
    if len(sizes) > 1:
        found = ", ".join(f"{size} bytes (layer {name!r} among others)" for size, name in sorted(sizes.items()))
        raise EngineStartError(
            f"attention layers take different numbers of bytes per block: {found}. All groups of layers share one pool of "
            "blocks, which must be equally large for each; layers with other numbers of key heads or head sizes are not served"
        )
    if len({spec.block_size for spec in kinds}) > 1:
        raise EngineStartError(f"attention layers have different block sizes: {sorted({s.block_size for s in kinds})}")


def _numbers_of_groups(counts: Sequence[Sequence[int]]) -> list[int]:
    """Groups of each kind, given its layers on each stage: the largest groups that leave no more than ``MAX_WASTE`` of any kind's
    places empty, or else those that leave least."""
    if len(counts) == 1:
        return [1]
    least, best = 1.0, [1] * len(counts)
    for size in range(max(map(max, counts)), 0, -1):
        numbers = [max(-(-layers // size) for layers in kind) for kind in counts]
        waste = _waste(counts, numbers)
        if waste <= MAX_WASTE:
            return numbers
        if waste < least:
            least, best = waste, numbers
    return best


def _waste(counts: Sequence[Sequence[int]], numbers: Sequence[int]) -> float:
    """Share of its places that the worst kind leaves empty, when each is cut into so many groups on every stage."""
    stages = range(len(counts[0]))
    sizes = [max(-(-kind[stage] // number) for kind, number in zip(counts, numbers, strict=True)) for stage in stages]
    return max(1 - sum(kind) / (number * sum(sizes)) for kind, number in zip(counts, numbers, strict=True))


def _part(names: Sequence[str], index: int, number: int) -> Sequence[str]:
    """Part ``index`` of ``number`` nearly equal ones."""
    size, rest = divmod(len(names), number)
    begin = index * size + min(index, rest)
    return names[begin : begin + size + (index < rest)]
