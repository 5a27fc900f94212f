"""Keys of full KV blocks: a hash chain, so that one key stands for all tokens up to the end of its block.

The hash is SHA-256. A key that collides would hand one caller the KV data of another, so it has to withstand somebody who
chooses prompts to that end; and on processors with SHA instructions it is as fast here as BLAKE2 (0.8 µs a block of 16
tokens, most of it the call). Keys depend on their input alone: not on the process, its hash seed or the byte order.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

_DOMAIN = b"pegboard/kv/1"


def root_key(block_size: int, salt: str | None = None, extra: Iterable[bytes] = ()) -> bytes:
    """What the first block's key is chained to. ``salt`` and ``extra`` (adapter, image content) separate equal tokens that
    must not share blocks; as every later key follows from the first, they are hashed once. An empty salt is none."""
    digest = hashlib.sha256(_DOMAIN + struct.pack("<Q", block_size))
    for part in (b"salt:" + salt.encode("utf-8", "surrogatepass") if salt else b"", *extra):
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


@lru_cache(maxsize=16)
def _packer(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}I")


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
    """Append to ``keys`` until it covers the first ``num_blocks`` full blocks of ``token_ids``.

    Raises ``struct.error`` on a token id outside [0, 2**32), such as a placeholder.
    """
    pack, sha256 = _packer(block_size).pack, hashlib.sha256
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block_size, num_blocks * block_size, block_size):
        parent = sha256(parent + pack(*token_ids[start : start + block_size])).digest()
        keys.append(parent)


def group_keys(keys: Sequence[bytes], group: int) -> Sequence[bytes]:
    """The same keys for another KV-cache group, whose blocks hold other layers' data."""
    return keys if group == 0 else [key + bytes((group,)) for key in keys]
