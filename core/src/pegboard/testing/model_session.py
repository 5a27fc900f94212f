"""Run a model by hand: a paged cache, block tables and steps of any mixture of rows, without scheduler or worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pegboard.contracts.attention import AttentionBackend, CommonAttentionMetadata
from pegboard.contracts.model import AttentionGroup, ForwardContext, Model
from pegboard.testing.reference_attention import ReferenceAttentionBackend


class ModelSession:
    """Requests named by the caller, each with its own blocks. ``step`` computes the next tokens of any of them.

    ``prompt_lens``: total prompt lengths of requests whose prompt comes in several steps (default: the first step's tokens).
    """

    def __init__(
        self, model: Model, *, backend: AttentionBackend | None = None, block_size: int = 4, num_blocks: int = 128, seed: int = 0
    ) -> None:
        self.model, self.block_size = model, block_size
        self.backend = backend or ReferenceAttentionBackend()
        self.computed: dict[str, int] = {}
        self.prompt_lens: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))
        self._free = [int(block) + 1 for block in order]  # block 0 stays unused, and neighbours are not adjacent
        self.caches = self._make_caches(model, num_blocks)

    def to(self, dtype: torch.dtype) -> ModelSession:
        """Keep the cache in ``dtype`` instead of float32."""
        self.caches = {name: cache.to(dtype) for name, cache in self.caches.items()}
        return self

    def step(self, rows: Mapping[str, Sequence[int]], prompt_lens: Mapping[str, int] | None = None) -> dict[str, torch.Tensor]:
        """Compute the given next tokens of each request, in this order. Returns logits [tokens, vocab_size] of each."""
        tokens, positions, lengths, slots, starts, seq_lens = [], [], [], [], [0], []
        for name, new in rows.items():
            first = self.computed.get(name, 0)
            self.prompt_lens.setdefault(name, (prompt_lens or {}).get(name, len(new)))
            for position, token in enumerate(new, first):
                tokens.append(token)
                positions.append(position)
                slots.append(self._slot(name, position))
            lengths += [self.prompt_lens[name]] * len(new)
            starts.append(len(tokens))
            seq_lens.append(first + len(new))
            self.computed[name] = first + len(new)
        width = max(len(self.blocks[name]) for name in rows)
        common = CommonAttentionMetadata(
            query_start_loc=np.array(starts, dtype=np.int32),
            seq_lens=np.array(seq_lens, dtype=np.int32),
            block_table=torch.tensor([self.blocks[n] + [0] * (width - len(self.blocks[n])) for n in rows], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            block_size=self.block_size,
            num_rows=len(rows),
            num_tokens=len(tokens),
        )
        logits = self._logits(torch.tensor(tokens), torch.tensor(positions), common, torch.tensor(lengths)).float()
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(rows)}

    def greedy(self, prompt: Sequence[int], max_tokens: int, name: str = "greedy") -> list[int]:
        """The most likely continuation of ``prompt``, token by token."""
        found = [int(self.step({name: prompt})[name][-1].argmax())]
        while len(found) < max_tokens:
            found.append(int(self.step({name: found[-1:]})[name][-1].argmax()))
        return found

    def _logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, common: CommonAttentionMetadata, prompt_lens: torch.Tensor
    ) -> torch.Tensor:
        context = self._context(common, self.caches, prompt_lens)
        hidden = self.model.forward(tokens, positions, context)
        assert isinstance(hidden, torch.Tensor)
        return self.model.compute_logits(hidden)

    def _context(
        self, common: CommonAttentionMetadata, caches: Mapping[str, torch.Tensor] | None, prompt_lens: torch.Tensor
    ) -> ForwardContext:
        """All layers are one group."""
        group = AttentionGroup(self.backend, self.backend.build_metadata(common))
        return ForwardContext(dict.fromkeys(caches or (), group), caches, prompt_lens)

    def _make_caches(self, model: Model, num_blocks: int) -> dict[str, torch.Tensor]:
        shape = self.backend.kv_cache_shape
        return {
            layer.name: torch.zeros(shape(num_blocks, self.block_size, layer.num_kv_heads, layer.head_size))
            for layer in model.attention_layers
        }

    def _slot(self, name: str, position: int) -> int:
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) <= position // self.block_size:
            blocks.append(self._free.pop())
        return blocks[position // self.block_size] * self.block_size + position % self.block_size
