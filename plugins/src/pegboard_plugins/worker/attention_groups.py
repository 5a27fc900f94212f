"""Which attention backend serves which layers of a worker, and an instance of it per group of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionQuery, CommonAttentionMetadata, KVScales
from pegboard.contracts.model import AttentionGroup
from pegboard.plugins.attention import select_attention
from pegboard_plugins.worker.delegating import scaled

if TYPE_CHECKING:
    from pegboard.plugins import Composition


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Names of the layers of this rank that share a block table, and their backend. A group may have all its layers on other
    ranks."""

    backend: AttentionBackend
    layers: tuple[str, ...]


def groups_in_step(groups: Sequence[LayerGroup], steps: Sequence[CommonAttentionMetadata]) -> dict[str, AttentionGroup]:
    """What a ``ForwardContext`` needs: the layers of all groups, ``steps[i]`` being the step as group ``i`` sees it."""
    pairs = zip(groups, steps, strict=True)
    return by_layer(groups, [group.backend.build_metadata(step) if group.layers else None for group, step in pairs])


def by_layer(groups: Iterable[LayerGroup], metadata: Sequence[Any]) -> dict[str, AttentionGroup]:
    """The same from the metadata of each group's backend."""
    found: dict[str, AttentionGroup] = {}
    for group, each in zip(groups, metadata, strict=True):
        found.update(dict.fromkeys(group.layers, AttentionGroup(group.backend, each)))
    return found


class AttentionChoices:
    """The choice for each kind of layers, made before it is known which layers share a block table."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        composition: Composition,
        device: torch.device,
        dtype: str,
        block_size: int,
        kv_dtype: str,
        kv_scales: KVScales = "none",
    ) -> None:
        """Raises ``CompositionError`` where no backend can serve some layer."""
        self._composition, self._device = composition, device
        self._scaled: dict[str, AttentionLayer] = {}
        self._queries = {
            layer.name: AttentionQuery.of(
                layer, device=device.type, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size, kv_scales=kv_scales
            )
            for layer in layers
        }
        self._choices = {query: select_attention(query, composition) for query in dict.fromkeys(self._queries.values())}

    def report(self) -> list[dict[str, Any]]:
        """For each kind of layers the name of the backend, the type of its cache, how many layers, and why this backend."""
        count = Counter(self._queries.values())
        return [
            {"backend": choice.provider.name, "kv_dtype": query.kv_dtype, "num_layers": count[query], "reasons": choice.reasons}
            for query, choice in self._choices.items()
        ]

    def by_kind(self) -> tuple[LayerGroup, ...]:
        """Layers that ask the same of a backend together."""
        return tuple(self.group(names) for names in self._kinds().values())

    def group(self, layers: Sequence[str]) -> LayerGroup:
        """A backend of its own for those of ``layers`` that are on this rank: the first choice for one of them that serves all.
        Raises ``ValueError`` where there is none."""
        own = tuple(name for name in layers if name in self._queries)
        queries = list(dict.fromkeys(self._queries[name] for name in own)) or list(self._choices)[:1]
        refusals: list[str] = []
        for query in queries:
            choice = self._choices[query]
            refused = [
                f"{choice.provider.name!r} not {q}: {reason}" for q in queries for reason in choice.backend.supports(q).reasons
            ]
            if not refused:
                backend: AttentionBackend = self._composition.make(choice.provider, query=query, device=self._device)
                return LayerGroup(scaled(backend, self._scaled) if self._scaled else backend, own)
            refusals += refused
        raise ValueError(
            f"no attention backend chosen for these layers serves all of them, which share a block table: {'; '.join(refusals)}; "
            "name another one with attention.backend"
        )

    def use_scales(self, layers: Sequence[AttentionLayer]) -> None:
        """Backends that are made from now on see these layers, which have scales, instead of those that a model passes."""
        self._scaled = {layer.name: layer for layer in layers}

    def plain(self) -> list[LayerGroup]:
        """The layers on backends for a cache of the type in which they compute. Raises ``ValueError`` where there is none."""
        groups = []
        for query, names in self._kinds().items():
            choice, asked = self._choices[query], replace(query, kv_dtype=query.dtype, kv_scales="none")
            if not (support := choice.backend.supports(asked)).ok:
                raise ValueError(
                    f"attention backend {choice.provider.name!r} cannot serve {asked}, with which scales are measured: "
                    f"{'; '.join(support.reasons)}; name another one with attention.backend"
                )
            groups.append(LayerGroup(self._composition.make(choice.provider, query=asked, device=self._device), tuple(names)))
        return groups

    def _kinds(self) -> dict[AttentionQuery, list[str]]:
        kinds: dict[AttentionQuery, list[str]] = {}
        for name, query in self._queries.items():
            kinds.setdefault(query, []).append(name)
        return kinds
