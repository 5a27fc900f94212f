"""AttentionBackend: attention over the paged KV cache, and the metadata that it needs."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch

API: Final = 1

GraphSupport = Literal["never", "decode_only", "always"]

KVScales = Literal["none", "tensor", "head"]
"""What a layer's stored keys and values are multiplied with when they are read: nothing, a number, or a number per head."""

INT8_LIMIT: Final = 127
"""Keys and values in an int8 cache are rounded to the nearest whole number (ties to even) and cut off at plus and minus this."""
FLOAT8_LIMIT: Final = 448.0
"""The same for a float8_e4m3fn cache: its largest number. Rounding is to the nearest, ties to even."""


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """What a layer group asks of a backend."""

    device: str
    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    kv_scales: KVScales = "none"

    @classmethod
    def of(
        cls, layer: AttentionLayer, *, device: str, dtype: str, kv_dtype: str, block_size: int, kv_scales: KVScales = "none"
    ) -> AttentionQuery:
        """What ``layer`` asks for, computed in ``dtype`` over a cache of ``kv_dtype``."""
        return cls(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            block_size=block_size,
            sliding_window=layer.sliding_window,
            logits_soft_cap=layer.logits_soft_cap,
            alibi=layer.alibi_slopes is not None,
            sinks=layer.sinks is not None,
            kv_scales=kv_scales,
        )


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend can serve a query, with every reason why not."""

    ok: bool
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, *reasons: str | None) -> Support:
        """Supported unless a reason is given."""
        found = tuple(r for r in reasons if r)
        return cls(not found, found)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one attention layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    """Each token sees itself and the ``sliding_window - 1`` tokens before it."""
    logits_soft_cap: float | None = None
    """``cap * tanh(scores / cap)`` before the softmax."""
    alibi_slopes: torch.Tensor | None = field(default=None, compare=False)
    """[num_heads] float32: ``slope * (key position - query position)`` is added to the scores."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """[num_heads] float32: the score of a key without a value that every query also sees."""
    key_scale: float | torch.Tensor | None = field(default=None, compare=False)
    """Stored keys are multiplied with it, and divided by it before they are stored: a number, or [num_kv_heads] float32."""
    value_scale: float | torch.Tensor | None = field(default=None, compare=False)
    """The same for values."""


@dataclass(slots=True)
class CommonAttentionMetadata:
    """One step, as every backend gets it. B rows (requests), T tokens; rows in batch order, a row's tokens adjacent.

    Arrays are numpy on the host; ``block_table`` and ``slot_mapping`` are tensors on the device.
    Row i's tokens are ``query_start_loc[i] … query_start_loc[i + 1] - 1``; they are the last ``query_len`` tokens of its
    ``seq_lens[i]`` tokens. A row may have query length 0 (padding): its output is left alone.
    """

    query_start_loc: np.ndarray
    """[B + 1] int32."""
    seq_lens: np.ndarray
    """[B] int32: tokens in the cache after this step, those of this step included."""
    block_table: torch.Tensor
    """[B, max_blocks] int32: block ids; entries past a row's length are undefined but valid ids. So are those of tokens that none
    of the row's new ones sees through the sliding window of the group: these blocks may be others' by now."""
    slot_mapping: torch.Tensor
    """[T] int64: ``block_id * block_size + offset`` where each token's key and value go."""
    block_size: int
    num_rows: int
    num_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)


class AttentionBackend(abc.ABC):
    """One instance per worker and group of layers that share a block table. Constructed with ``query`` (an ``AttentionQuery`` it
    supports).

    Invariants: ``forward`` writes exactly the cache slots of ``slot_mapping`` and the rows of ``out`` that have tokens; it
    writes all of them before it reads any, because rows may share blocks that another row of the same step fills;
    results of a row depend on that row alone; a step is one ``build_metadata`` and one ``forward`` per layer.
    """

    name: ClassVar[str]
    graph_support: ClassVar[GraphSupport] = "never"
    """Of which steps a graph can be captured: ``decode_only`` are those whose rows have one token each. A backend that says
    ``decode_only`` or ``always`` has ``graph_metadata`` and ``refill``, which are for such steps; one that says ``always`` can
    also be captured on what ``build_metadata`` gives for other steps, and replayed on the same step."""
    kv_layout: ClassVar[str] = ""
    """Names of the dimensions of ``kv_cache_shape``, such as "block kv head token dim". Backends with the same layout and shape
    can work on one cache; with an empty one a backend works on its own only."""

    @classmethod
    @abc.abstractmethod
    def supports(cls, query: AttentionQuery) -> Support:
        """Truthful: whatever it accepts works. Must not initialise a device."""

    @classmethod
    @abc.abstractmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor. The first dimension is the block, so that a block can be copied by index."""

    @classmethod
    def move_blocks(cls, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copy whole blocks of one layer's cache; ``pairs`` [N, 2] int64, of ids in ``source`` and ids in ``target``. They may be
        the same tensor (forks), or lie on device and host (swaps). Every source is read before any target is written."""
        import torch

        if source.dtype.itemsize == 1:  # torch indexes no 8-bit floating point numbers on a processor
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        moved = source.index_select(0, pairs[:, 0].to(source.device))
        target.index_copy_(0, pairs[:, 1].to(target.device), moved.to(target.device))

    @abc.abstractmethod
    def build_metadata(self, common: CommonAttentionMetadata) -> Any:
        """Whatever ``forward`` needs, computed once per step and shared by the layers of the group."""

    def graph_metadata(self, num_rows: int, max_blocks: int) -> Any:
        """Metadata of a step of ``num_rows`` rows with one token each and up to ``max_blocks`` blocks, for a graph: in buffers
        that stay where they are, and with everything that a captured ``forward`` bakes in fixed by these two numbers. All rows
        are padding until ``refill``. Raises ``TypeError`` for a backend whose ``graph_support`` is "never"."""
        raise TypeError(f"{type(self).__name__}.graph_support is {self.graph_support!r}: it has no metadata for graphs")

    def refill(self, metadata: Any, common: CommonAttentionMetadata) -> None:
        """Put a step of at most as many rows, with one token each, into what ``graph_metadata`` made; the rows after them become
        padding, which stores nothing. Only copies on the current stream, so that a replay may follow at once."""
        raise TypeError(f"{type(self).__name__}.graph_support is {self.graph_support!r}: it has no metadata for graphs")

    @abc.abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write ``key``/``value`` [T, num_kv_heads, head_size] into ``kv_cache``, then attend with ``query``
        [T, num_heads, head_size] causally over each row's own tokens. Fills and returns ``out``, shaped like ``query``."""


class SplitAttentionBackend(AttentionBackend):
    """A backend that stores and attends in two calls, so that a part of a step's rows can be given to another one.

    In a pair each of two backends gets its own rows, and both have stored before one attends (see ``AttentionBackend``).
    """

    @abc.abstractmethod
    def store(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> None:
        """Write ``key``/``value`` [T, num_kv_heads, head_size] into their slots."""

    @abc.abstractmethod
    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, out: torch.Tensor
    ) -> torch.Tensor:
        """Attention of ``query`` [T, num_heads, head_size] over the cache. Fills and returns ``out``."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        self.store(layer, key, value, kv_cache, metadata)
        return self.attend(layer, query, kv_cache, metadata, out)
