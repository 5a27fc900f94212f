"""A graph runner on a small model with two attention groups, and the same steps without it. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pegboard.config import EngineConfig
from pegboard.contracts.attention import AttentionLayer, AttentionQuery, CommonAttentionMetadata
from pegboard.contracts.graph_runner import ForwardInputs, GraphRunner, GraphTarget
from pegboard.contracts.model import AttentionGroup, ForwardContext, Model
from pegboard.contracts.platform import Platform
from pegboard.contracts.weight_loader import WeightHandle
from pegboard.testing.graph_attention import GraphableAttention

Hidden = torch.Tensor | Mapping[str, torch.Tensor]
MakeRunner = Callable[[EngineConfig, Platform], GraphRunner]

WIDTH, HEADS, VOCAB, MAX_LEN, BLOCK = 16, 2, 50, 64, 4
WINDOWS = (None, 6)


class TwoGroupModel(Model):
    """A layer without a window and one with, each with a block table of its own."""

    capturable = True

    def __init__(self, device: torch.device, is_first: bool = True, is_last: bool = True) -> None:
        made = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made).div_(shape[-1] ** 0.5).to(device)

        self._is_first, self._is_last = is_first, is_last
        self.embedding, self.places = weight(VOCAB, WIDTH) * 4, weight(MAX_LEN + 1, WIDTH)
        self.projections = [weight(3 * WIDTH, WIDTH) for _ in WINDOWS]
        self._layers = [
            AttentionLayer(f"layers.{i}", HEADS, HEADS, WIDTH // HEADS, 1.0, sliding_window=window)
            for i, window in enumerate(WINDOWS)
        ]

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        return self._layers

    def load_weights(self, weights: Mapping[str, WeightHandle]) -> None:
        """They are there."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        intermediate: Mapping[str, torch.Tensor] | None = None,
    ) -> Hidden:
        hidden = self.embedding[input_ids] if intermediate is None else intermediate["hidden"]
        hidden = hidden + self.places[positions]
        if context.prompt_lens is not None:
            hidden = hidden * context.prompt_lens[:, None].float().rsqrt()
        assert context.kv_caches is not None
        for layer, projection in zip(self._layers, self.projections, strict=True):
            group = context.attention[layer.name]
            query, key, value = (hidden @ projection.T).view(len(hidden), 3, HEADS, -1).unbind(1)
            out = torch.empty_like(query)
            group.backend.forward(layer, query, key, value, context.kv_caches[layer.name], group.metadata, out)
            hidden = hidden + out.reshape(hidden.shape)
        return hidden if self._is_last else {"hidden": hidden}

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.T


@dataclass
class GraphRow:
    blocks: tuple[list[int], ...] = field(default_factory=lambda: tuple([] for _ in WINDOWS))
    """In each group."""
    length: int = 0


class GraphSession:
    """``check`` runs a step with the runner and without, from the same caches, and compares results and caches.

    ``settings`` are those of the section ``compilation``.
    """

    def __init__(
        self,
        make: MakeRunner,
        platform: Platform,
        *,
        max_rows: int = 6,
        is_first: bool = True,
        is_last: bool = True,
        with_prompt_lens: bool = False,
        num_blocks: int = 80,
        **settings: Any,
    ) -> None:
        config = EngineConfig(model="m", scheduler={"max_num_seqs": max_rows}, compilation=settings)
        self.device = platform.set_device(0, None)
        self.runner = make(config, platform)
        self.model = TwoGroupModel(self.device, is_first, is_last)
        self._random = np.random.default_rng(0)
        self._is_first, self._with_prompt_lens = is_first, with_prompt_lens
        self.rows: dict[str, GraphRow] = {}
        self._free = [self._random.permutation(np.arange(1, num_blocks)).tolist() for _ in WINDOWS]
        self._num_blocks = num_blocks
        self.caches: dict[str, torch.Tensor] = {}
        self.backends = [GraphableAttention(_query(layer, self.device), self.device) for layer in self.model.attention_layers]
        self._max_rows = max_rows
        self.make_caches()

    def make_caches(self) -> None:
        """New ones, empty, at other addresses; the rows start anew."""
        shape = GraphableAttention.kv_cache_shape(self._num_blocks, BLOCK, HEADS, WIDTH // HEADS)
        kept = list(self.caches.values())
        self.caches = {layer.name: torch.zeros(shape, device=self.device) for layer in self.model.attention_layers}
        del kept
        self.rows.clear()

    def target(self, **changes: Any) -> GraphTarget:
        """Of the model as it is now."""
        return GraphTarget(
            **{
                "forward": self.forward,
                "model": self.model,
                "backends": self.backends,
                "device": self.device,
                "dtype": torch.float32,
                "max_rows": self._max_rows,
                "max_blocks": [MAX_LEN // BLOCK] * len(WINDOWS),
                "prompt_lens": self._with_prompt_lens,
                "widths": {} if self._is_first else {"hidden": WIDTH},
                **changes,
            }
        )

    def forward(self, inputs: ForwardInputs, metadata: Sequence[Any]) -> Hidden:
        groups = {
            layer.name: AttentionGroup(backend, each)
            for layer, backend, each in zip(self.model.attention_layers, self.backends, metadata, strict=True)
        }
        context = ForwardContext(groups, self.caches, inputs.prompt_lens)
        return self.model.forward(inputs.input_ids, inputs.positions, context, inputs.intermediate)

    def prepare(self, new: Sequence[tuple[str, int]]) -> ForwardInputs:
        """Give each named row so many new tokens."""
        rows = [self.rows.setdefault(name, GraphRow()) for name, _ in new]
        counts = np.array([count for _, count in new], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        before = np.array([row.length for row in rows], np.int32)
        lengths, total = before + counts, int(starts[-1])
        positions = np.arange(total) + np.repeat(before - starts[:-1], counts)
        attention = [self._step(group, rows, counts, starts, lengths, positions) for group in range(len(WINDOWS))]
        for row, length in zip(rows, lengths.tolist(), strict=True):
            row.length = length
        draw = torch.from_numpy(self._random.integers(0, VOCAB, total)).to(self.device)
        hidden = torch.from_numpy(self._random.standard_normal((total, WIDTH), np.float32)).to(self.device)
        return ForwardInputs(
            input_ids=draw,
            positions=torch.from_numpy(positions).to(self.device),
            attention=attention,
            prompt_lens=draw % 7 + 1 if self._with_prompt_lens else None,
            intermediate=None if self._is_first else {"hidden": hidden},
        )

    def eager(self, inputs: ForwardInputs) -> Hidden:
        metadata = [b.build_metadata(common) for b, common in zip(self.backends, inputs.attention, strict=True)]
        return self.forward(inputs, metadata)

    @torch.inference_mode()
    def check(self, new: Sequence[tuple[str, int]], replayed: bool = True) -> None:
        """One step. ``replayed``: whether a graph runs it, or it does not fit."""
        inputs = self.prepare(new)
        assert self.runner.fits(inputs.attention) == replayed, f"{self.runner.report} and a step of {list(new)}"
        if not replayed:
            self.eager(inputs)
            return
        kept = {name: cache.clone() for name, cache in self.caches.items()}
        given = [t.clone() for t in (inputs.input_ids, inputs.positions)]
        found = _copy(self.runner.run(inputs))
        assert all(map(torch.equal, given, (inputs.input_ids, inputs.positions))), "run must not change what it is given"
        after = {name: cache.clone() for name, cache in self.caches.items()}
        for name, cache in self.caches.items():
            cache.copy_(kept[name])
        expected = self.eager(inputs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after, self.caches, rtol=1e-5, atol=1e-5)

    def _step(
        self,
        group: int,
        rows: Sequence[GraphRow],
        counts: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        positions: np.ndarray,
    ) -> CommonAttentionMetadata:
        for row, length in zip(rows, lengths.tolist(), strict=True):
            while len(row.blocks[group]) * BLOCK < length:
                row.blocks[group].append(self._free[group].pop())
        table = np.zeros((len(rows), max(len(row.blocks[group]) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            table[i, : len(row.blocks[group])] = row.blocks[group]
        of_token = np.repeat(np.arange(len(rows)), counts)
        slots = table[of_token, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        return CommonAttentionMetadata(
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=torch.from_numpy(table).to(self.device),
            slot_mapping=torch.from_numpy(slots).to(self.device),
            block_size=BLOCK,
            num_rows=len(rows),
            num_tokens=len(positions),
        )


def _copy(hidden: Hidden) -> Hidden:
    return {name: t.clone() for name, t in hidden.items()} if isinstance(hidden, Mapping) else hidden.clone()


def _query(layer: AttentionLayer, device: torch.device) -> AttentionQuery:
    return AttentionQuery(
        device.type, "float32", "float32", HEADS, HEADS, WIDTH // HEADS, BLOCK, sliding_window=layer.sliding_window
    )
