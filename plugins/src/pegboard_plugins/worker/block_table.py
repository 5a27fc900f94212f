"""BlockTable: which KV blocks each slot's request holds, in token order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BlockTable:
    """``blocks`` [slots, max_blocks] int32 on the host. Entries behind a row's own are old or zero: undefined, but valid ids."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int) -> None:
        self.blocks = np.zeros((num_slots, max_blocks), np.int32)
        self.lengths = np.zeros(num_slots, np.int32)
        self.block_size = block_size

    def replace(self, slot: int, block_ids: Sequence[int]) -> None:
        self.lengths[slot] = 0
        self.append(slot, block_ids)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        begin = int(self.lengths[slot])
        end = begin + len(block_ids)
        if end > self.blocks.shape[1]:
            raise ValueError(
                f"slot {slot} is given {end} blocks, but a request of the full context length has {self.blocks.shape[1]}"
            )
        self.blocks[slot, begin:end] = block_ids
        self.lengths[slot] = end

    def width(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def slot_mapping(self, slots: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """Where the keys and values of tokens go: ``slots`` and ``positions`` [T] to ``out`` [T] int64."""
        blocks, offsets = np.divmod(positions, self.block_size)
        np.multiply(self.blocks[slots, blocks], self.block_size, out=out, casting="unsafe")
        out += offsets
