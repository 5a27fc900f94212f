"""EngineInfo: what a booted engine can hold, in numbers. Plain data that also crosses to a front end in another process."""

from __future__ import annotations

import logging

import msgspec

from pegboard.config import EngineConfig
from pegboard.config.errors import ConfigError, Problem
from pegboard.contracts.model import ModelSpec
from pegboard.engine.errors import EngineStartError
from pegboard.wire import KVCacheConfig
from pegboard.wire.kv_cache import UNLIMITED

log = logging.getLogger(__name__)


def check_context(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ``ConfigError`` when a longer context is asked for than the checkpoint supports (rope scaling applied)."""
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        message = f"{config.max_model_len} is more than the {spec.max_model_len} tokens that the checkpoint supports"
        remedy = "lower it, or leave it out; a longer context needs rope scaling in the checkpoint's config.json"
        raise ConfigError([Problem("max_model_len", message, remedy)])


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``max_model_len``: most tokens of one request, prompt and output, as configured. ``kv_tokens``: tokens that the KV
    cache can hold for one request. ``reason`` says in words which of the two is the limit. ``seed``: from which requests without
    one get theirs; None draws them from entropy."""

    model: str
    vocab_size: int
    max_model_len: int
    kv_tokens: int
    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    seed: int | None = None

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, kv_config: KVCacheConfig, seed: int | None = None) -> EngineInfo:
        """Raises ``EngineStartError`` when the KV cache cannot hold a single token; warns when it is shorter than the context."""
        max_model_len = config.max_model_len or spec.max_model_len
        tokens = kv_config.tokens_per_request(min(config.scheduler.max_num_batched_tokens, max_model_len))
        info = cls(
            model=config.model,
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            kv_tokens=max_model_len if tokens == UNLIMITED else tokens,
            num_blocks=kv_config.num_blocks - 1,
            block_size=kv_config.block_size,
            num_host_blocks=kv_config.num_host_blocks,
            seed=seed,
        )
        if info.kv_tokens < 1:
            raise EngineStartError(f"the KV cache has {info.num_blocks} usable blocks; raise kv_cache.num_blocks")
        if info.max_tokens < info.max_model_len:
            log.warning(
                "the KV cache holds %d tokens of one request (%d blocks of %d), less than max_model_len=%d: longer requests are "
                "refused; raise kv_cache.memory or kv_cache.num_blocks, or lower max_model_len",
                info.kv_tokens, info.num_blocks, info.block_size, info.max_model_len,
            )  # fmt: skip
        return info

    @property
    def max_tokens(self) -> int:
        """Most tokens of one request. The last output token needs no room in the cache: nothing is computed from it."""
        return min(self.max_model_len, self.kv_tokens + 1)

    @property
    def reason(self) -> str:
        if self.max_tokens == self.max_model_len:
            return f"max_model_len={self.max_model_len}"
        return (
            f"{self.max_tokens} tokens: the KV cache holds {self.kv_tokens} ({self.num_blocks} blocks of {self.block_size}), "
            f"less than max_model_len={self.max_model_len}"
        )
