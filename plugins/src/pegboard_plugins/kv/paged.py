"""PagedAllocator: blocks on demand, nothing remembered."""

from __future__ import annotations

from pegboard_plugins.kv.block_pool import BlockPool


class PagedAllocator(BlockPool):
    """A block pool without prefix caching: keys are ignored, and a released block is at once as good as new."""

    caches_prefixes = False
