"""Two attention backends that share one cache: one for rows with several new tokens (prefill), one for rows with one (decode)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pegboard.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionQuery,
    CommonAttentionMetadata,
    SplitAttentionBackend,
    Support,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    Index = slice | torch.Tensor

Make = Callable[[type[AttentionBackend], dict[str, Any]], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a step that one of the two backends computes."""

    backend: SplitAttentionBackend
    tokens: Index
    metadata: Any

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part's tokens of a tensor of the whole step."""
        return tensor[self.tokens] if isinstance(self.tokens, slice) else tensor.index_select(0, self.tokens)


def unpairable(prefill: type[AttentionBackend], decode: type[AttentionBackend], query: AttentionQuery) -> list[str]:
    """Every reason why these two cannot share a cache."""
    reasons = [
        f"{backend.name} cannot store and attend apart (it is no SplitAttentionBackend)"
        for backend in dict.fromkeys((prefill, decode))
        if not issubclass(backend, SplitAttentionBackend)
    ]
    shapes = [b.kv_cache_shape(2, query.block_size, query.num_kv_heads, query.head_size) for b in (prefill, decode)]
    if shapes[0] != shapes[1]:
        reasons.append(f"their caches differ in shape: {prefill.name} {shapes[0]}, {decode.name} {shapes[1]} for two blocks")
    if not prefill.kv_layout or prefill.kv_layout != decode.kv_layout:
        reasons.append(
            f"their caches are laid out differently: {prefill.name} {prefill.kv_layout!r}, {decode.name} {decode.kv_layout!r}"
        )
    return reasons


def pair(prefill: type[SplitAttentionBackend], decode: type[SplitAttentionBackend], make: Make) -> type[AttentionBackend]:
    """A backend class whose instances hold one of each, made by ``make`` from the class and the arguments by name."""

    class Pair(PairedBackend):
        name = f"{prefill.name},{decode.name}"
        graph_support = "never" if decode.graph_support == "never" else "decode_only"
        kv_layout = decode.kv_layout
        classes = (prefill, decode)

        def __init__(self, query: AttentionQuery, device: Any = None) -> None:
            offered = {"query": query, "device": device}
            super().__init__(*(make(each, offered) for each in self.classes))

    return Pair


class PairedBackend(AttentionBackend):
    """Gives each of two backends its rows of a step, as a step of their own. Both store before one of them attends, because rows
    may share blocks across the two."""

    classes: tuple[type[SplitAttentionBackend], type[SplitAttentionBackend]]
    """For prefill and for decode."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self.prefill, self.decode = prefill, decode

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        refused = [f"{backend.name}: {reason}" for backend in cls.classes for reason in backend.supports(query).reasons]
        return Support.of(*refused, *unpairable(*cls.classes, query))

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return cls.classes[1].kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def move_blocks(cls, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        cls.classes[1].move_blocks(source, target, pairs)

    def build_metadata(self, common: CommonAttentionMetadata) -> list[Part]:
        import numpy as np

        lengths = np.diff(common.query_start_loc)
        rows = ((self.prefill, np.flatnonzero(lengths > 1)), (self.decode, np.flatnonzero(lengths == 1)))
        return [self._part(backend, common, chosen, lengths) for backend, chosen in rows if len(chosen)]

    def graph_metadata(self, num_rows: int, max_blocks: int) -> list[Part]:
        return [Part(self.decode, slice(None), self.decode.graph_metadata(num_rows, max_blocks))]

    def refill(self, metadata: list[Part], common: CommonAttentionMetadata) -> None:
        self.decode.refill(metadata[0].metadata, common)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: list[Part],
        out: torch.Tensor,
    ) -> torch.Tensor:
        for part in metadata:
            part.backend.store(layer, part.of(key), part.of(value), kv_cache, part.metadata)
        for part in metadata:
            if isinstance(part.tokens, slice):
                part.backend.attend(layer, part.of(query), kv_cache, part.metadata, out[part.tokens])
            else:
                picked = part.of(query)
                out[part.tokens] = part.backend.attend(layer, picked, kv_cache, part.metadata, picked.new_empty(picked.shape))
        return out

    def _part(
        self, backend: SplitAttentionBackend, common: CommonAttentionMetadata, rows: np.ndarray, lengths: np.ndarray
    ) -> Part:
        """The step that consists of ``rows`` [N]. Copies nothing where they lie side by side."""
        import numpy as np

        own, starts = lengths[rows], common.query_start_loc[rows]
        loc = np.concatenate([[0], np.cumsum(own)]).astype(np.int32)
        tokens = np.arange(loc[-1]) + np.repeat(starts - loc[:-1], own)
        at_tokens = _index(tokens, common.slot_mapping)
        at_rows = _index(rows, common.block_table)
        step = replace(
            common,
            query_start_loc=loc,
            seq_lens=common.seq_lens[rows],
            block_table=common.block_table[at_rows],
            slot_mapping=common.slot_mapping[at_tokens],
            num_rows=len(rows),
            num_tokens=len(tokens),
        )
        return Part(backend, at_tokens, backend.build_metadata(step))


def _index(places: np.ndarray, like: torch.Tensor) -> Index:
    """A slice where ``places`` follow one another, else an int64 tensor beside ``like``."""
    import torch

    if int(places[-1]) - int(places[0]) == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    index = torch.from_numpy(places.astype("int64"))
    if like.device.type != "cpu":
        index = index.pin_memory()
    return index.to(like.device, non_blocking=True)
