"""What a token looks at in a KV-cache group with a sliding window."""

from __future__ import annotations


def first_token(num_computed: int, window: int | None) -> int:
    """The first of ``num_computed`` tokens at which the next one looks."""
    return 0 if window is None else max(0, num_computed - window + 1)


def first_seen(num_computed: int, window: int | None, block_size: int) -> int:
    """The first block with such a token, counted from the start of the request."""
    return first_token(num_computed, window) // block_size
