"""Rows in a paged cache, driven through an attention backend and compared with plain attention. Needs torch.

The session keeps every row's keys and values densely in float64, hands out shuffled blocks, fills what nobody has written with
NaN, and block-table entries past a row's end and behind its window with other rows' blocks, as an engine may. So it sees a
backend that reads what is not the row's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionQuery, CommonAttentionMetadata
from pegboard.testing.reference_attention import attend, from_stored, to_stored
from pegboard.testing.windows import first_seen

TOLERANCE = {"float32": (1e-5, 1e-5), "float16": (4e-3, 4e-3), "bfloat16": (3e-2, 2e-2)}
"""(absolute, relative) against float64, for keys, queries and values drawn from N(0, 1). bfloat16 has 8 bits: scores and
probabilities rounded to it are off by up to 1/256 of themselves; a backend that keeps them in float32 does better."""


SCALES = {"int8": 0.037, "float8_e4m3fn": 0.61}
"""What layers with scales have, by the type of the cache (1.3 for others): numbers that float32 cannot hold exactly."""


@dataclass
class Row:
    """One request: its blocks, and all its keys and values so far."""

    blocks: list[int] = field(default_factory=list)
    keys: Any = None
    """[len, num_kv_heads, head_size] float64."""
    values: Any = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[0])


@dataclass
class Step:
    """One step's arguments and what must come out."""

    common: CommonAttentionMetadata
    query: Any
    key: Any
    value: Any
    expected: Any
    """[T, num_heads, head_size] float64."""


class AttentionSession:
    """One layer (or several that share the layer constants) on one backend."""

    def __init__(
        self,
        make: Callable[[AttentionQuery], AttentionBackend],
        query: AttentionQuery,
        *,
        num_blocks: int = 64,
        num_layers: int = 1,
        seed: int = 0,
        contiguous: bool = False,
    ) -> None:
        self.query = query
        self.backend = make(query)
        self.dtype, self.kv_dtype = getattr(torch, query.dtype), getattr(torch, query.kv_dtype)
        self.layer = layer_of(query)
        shape = self.backend.kv_cache_shape(num_blocks, query.block_size, query.num_kv_heads, query.head_size)
        self.caches = [self.empty_cache(shape) for _ in range(num_layers)]
        self.rows: dict[str, Row] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        free = np.arange(num_blocks) if contiguous else self._rng.permutation(num_blocks)
        self.free: list[int] = free.tolist()[::-1]
        self._num_blocks = num_blocks

    def empty_cache(self, shape: Sequence[int]) -> Any:
        """A cache full of what must not be read: NaN, or a large number where the type has none."""
        rubbish = 101 if self.kv_dtype == torch.int8 else float("nan")
        return torch.full(tuple(shape), rubbish, dtype=self.kv_dtype, device=self.query.device)

    def fork(self, parent: str, child: str, tokens: int) -> None:
        """A new row that shares its first ``tokens`` tokens (whole blocks) with another, as prefix caching does."""
        whole, rest = divmod(tokens, self.query.block_size)
        assert rest == 0, "only whole blocks can be shared"
        source = self.rows[parent]
        self.rows[child] = Row(source.blocks[:whole], source.keys[:tokens], source.values[:tokens])

    def forget(self, name: str) -> None:
        """The row ends; blocks that no other row shares are free again, with what is in them."""
        gone = self.rows.pop(name)
        kept = {block for row in self.rows.values() for block in row.blocks}
        self.free += [block for block in gone.blocks if block not in kept]

    def draw(self, *shape: int) -> Any:
        """N(0, 1) in the backend's dtype, on its device."""
        return torch.randn(*shape, generator=self._random).to(self.dtype).to(self.query.device)

    def prepare(
        self, new: Sequence[tuple[str, int]], *, forks: Mapping[str, tuple[str, int]] | None = None, spare_columns: int = 3
    ) -> Step:
        """Give each named row so many new tokens (0: the row is only there). ``forks``: a row that is new in this step to an
        earlier one of it, and how many tokens it shares with that one, those of this step included."""
        q = self.query
        count = sum(tokens for _, tokens in new)
        # Slices of one projection, as a fused qkv layer gives them: rows are strided.
        fused = self.draw(count, q.num_heads + 2 * q.num_kv_heads, q.head_size)
        query, key, value = fused.split([q.num_heads, q.num_kv_heads, q.num_kv_heads], dim=1)
        slots: list[int] = []
        expected = torch.zeros(query.shape, dtype=torch.float64)
        begin = 0
        for name, tokens in new:
            if forks and name in forks:
                self.fork(forks[name][0], name, forks[name][1])
            row, end = self.rows.setdefault(name, Row()), begin + tokens
            slots += self._append(row, key[begin:end], value[begin:end])
            if tokens:
                expected[begin:end] = attend(self.layer, query[begin:end].cpu().double(), row.keys, row.values)
            begin = end
        rows = [self.rows[name] for name, _ in new]
        width = max((len(row.blocks) for row in rows), default=0) + spare_columns
        table = self._rng.integers(0, self._num_blocks, (len(rows), width)).astype(np.int32)
        for i, (row, (_, tokens)) in enumerate(zip(rows, new, strict=True)):
            behind = first_seen(row.length - tokens, q.sliding_window, q.block_size)
            table[i, behind : len(row.blocks)] = row.blocks[behind:]
        common = CommonAttentionMetadata(
            query_start_loc=np.cumsum([0, *(tokens for _, tokens in new)]).astype(np.int32),
            seq_lens=np.array([row.length for row in rows], np.int32),
            block_table=torch.from_numpy(table).to(q.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=q.device),
            block_size=q.block_size,
            num_rows=len(rows),
            num_tokens=count,
        )
        return Step(common, query, key, value, expected)

    def run(self, step: Step, *, layer: int = 0, metadata: Any = None) -> Any:
        """One forward; the output buffer starts as NaN."""
        metadata = self.backend.build_metadata(step.common) if metadata is None else metadata
        out = torch.full(step.query.shape, float("nan"), dtype=self.dtype, device=self.query.device)
        result = self.backend.forward(self.layer, step.query, step.key, step.value, self.caches[layer], metadata, out)
        assert result.data_ptr() == out.data_ptr(), "forward must fill and return `out`"
        return out

    def replay(self, metadata: Any, step: Step | None, num_tokens: int) -> Any:
        """A forward on ``num_tokens`` tokens, of which those after ``step``'s are padding, as in a captured graph."""
        q = self.query
        whole = self.draw(num_tokens, q.num_heads + 2 * q.num_kv_heads, q.head_size)
        query, key, value = whole.split([q.num_heads, q.num_kv_heads, q.num_kv_heads], dim=1)
        if step is not None:
            for part, given in ((query, step.query), (key, step.key), (value, step.value)):
                part[: len(given)] = given
        out = torch.full(query.shape, float("nan"), dtype=self.dtype, device=q.device)
        return self.backend.forward(self.layer, query, key, value, self.caches[0], metadata, out)

    def check(self, new: Sequence[tuple[str, int]], forks: Mapping[str, tuple[str, int]] | None = None) -> None:
        """One step whose output must equal plain attention."""
        step = self.prepare(new, forks=forks)
        self.compare(self.run(step), step.expected)

    def compare(self, out: Any, expected: Any) -> None:
        """``out`` within the dtype's tolerance of ``expected``."""
        atol, rtol = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(out.cpu().double(), expected, atol=atol, rtol=rtol)

    def _append(self, row: Row, key: Any, value: Any) -> list[int]:
        """Slots of the new tokens; takes the blocks they need."""
        size, begin = self.query.block_size, row.length
        key = from_stored(to_stored(key, self.layer.key_scale, self.kv_dtype), self.layer.key_scale).cpu().double()
        value = from_stored(to_stored(value, self.layer.value_scale, self.kv_dtype), self.layer.value_scale).cpu().double()
        row.keys = key if row.keys is None else torch.cat([row.keys, key])
        row.values = value if row.values is None else torch.cat([row.values, value])
        while len(row.blocks) * size < row.length:
            row.blocks.append(self.free.pop())
        return [row.blocks[at // size] * size + at % size for at in range(begin, row.length)]


def layer_of(query: AttentionQuery) -> AttentionLayer:
    """A layer with everything that ``query`` speaks of."""
    heads = torch.arange(query.num_heads, device=query.device)
    key_scale = SCALES.get(query.kv_dtype, 1.3)
    by_head = 1 + 0.11 * torch.arange(query.num_kv_heads, device=query.device)
    scales: dict[str, tuple[Any, Any]] = {
        "none": (None, None),
        "tensor": (key_scale, 1.07 * key_scale),
        "head": (key_scale * by_head, 1.07 * key_scale * by_head.flip(0)),
    }
    return AttentionLayer(
        name="layers.0.attn",
        num_heads=query.num_heads,
        num_kv_heads=query.num_kv_heads,
        head_size=query.head_size,
        scale=query.head_size**-0.5,
        sliding_window=query.sliding_window,
        logits_soft_cap=query.logits_soft_cap,
        alibi_slopes=2.0 ** (-0.5 * (heads + 1)) if query.alibi else None,
        sinks=1.5 - 0.75 * (heads % 5) if query.sinks else None,
        key_scale=scales[query.kv_scales][0],
        value_scale=scales[query.kv_scales][1],
    )
