"""What one rank has of a decoder, and the layers that depend on it: plain ones, or those that ranks share."""

from __future__ import annotations

from pegboard.contracts.communicator import Communicator
from pegboard.wire import World
from pegboard_plugins.layers.embedding import TokenEmbedding
from pegboard_plugins.layers.linear import Linear
from pegboard_plugins.layers.linear_methods import FusedLinearMethod
from pegboard_plugins.layers.norm import QueryKeyNorm, RMSNorm, UnitOffsetQueryKeyNorm, UnitOffsetRMSNorm
from pegboard_plugins.layers.parallel import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from pegboard_plugins.layers.sharing import Share
from pegboard_plugins.models.decoder_config import DecoderConfig
from pegboard_plugins.models.decoder_tensors import EMBEDDING, HEAD


class DecoderParts:
    """``share``: this rank's part of every layer. ``num_heads``, ``num_kv_heads``: its own."""

    def __init__(self, config: DecoderConfig, method: FusedLinearMethod, world: World, communicator: Communicator | None) -> None:
        """Raises ``ValueError`` for sizes that so many ranks cannot share, or ranks without a communicator."""
        if world.tp_size > 1 and communicator is None:
            raise ValueError(f"{world.tp_size} ranks that share layers need a communicator")
        self._config, self._communicator = config, communicator if world.tp_size > 1 else None
        self.method = method
        self.share = Share(world.tp_rank, world.tp_size)
        self.is_first, self.is_last = world.is_first_stage, world.is_last_stage
        self.num_heads = self.share.evenly(config.num_heads).length
        self.num_kv_heads = self.share.key_heads(config.num_kv_heads).length

    def norm(self, name: str) -> RMSNorm:
        """Of the residual stream, or of what is added to it."""
        kind = UnitOffsetRMSNorm if self._config.unit_offset_norms else RMSNorm
        return kind(name, self._config.hidden_size, self._config.rms_norm_eps)

    def qk_norm(self, name: str) -> QueryKeyNorm:
        """Of this rank's heads."""
        kind = UnitOffsetQueryKeyNorm if self._config.unit_offset_norms else QueryKeyNorm
        return kind(name, self.num_heads, self.num_kv_heads, self._config.head_size, self._config.rms_norm_eps)

    def second_linear(self, name: str) -> Linear:
        """The second of two products, which brings a rank's part of the width between them back to the residual stream."""
        if self._communicator is None:
            return Linear(name, self.method)
        return RowParallelLinear(name, self.method, self._communicator)

    def embedding(self) -> TokenEmbedding:
        name = EMBEDDING.removesuffix(".weight")
        if self._communicator is None:
            return TokenEmbedding(name)
        rows = self.share.padded(self._config.vocab_size)
        return VocabParallelEmbedding(name, self.share.rank * rows, rows, self._communicator)

    def head(self) -> Linear:
        name = HEAD.removesuffix(".weight")
        if self._communicator is None:
            return Linear(name, self.method)
        return VocabParallelHead(name, self.method, self._config.vocab_size, self._communicator)
