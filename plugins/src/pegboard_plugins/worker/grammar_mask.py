"""Token bitmasks of grammars, applied to logits."""

from __future__ import annotations

import numpy as np
import torch

from pegboard.wire import GrammarOutput


def mask_logits(logits: torch.Tensor, slots: np.ndarray, grammar: GrammarOutput) -> None:
    """Forbid, in place, every token whose bit is not set. ``logits`` [N, V] belong to ``slots`` [N]; slots that do not sample
    are passed over."""
    size = logits.shape[1]
    words = np.frombuffer(grammar.bitmask, np.dtype("<u4")).reshape(len(grammar.slots), -1)
    row_of = {slot: row for row, slot in enumerate(slots.tolist())}
    for slot, bits in zip(grammar.slots, words, strict=True):
        row = row_of.get(slot)
        if row is not None:
            allowed = np.zeros(size, np.bool_)
            found = np.unpackbits(bits.view(np.uint8), bitorder="little")[:size]
            allowed[: len(found)] = found
            logits[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))
