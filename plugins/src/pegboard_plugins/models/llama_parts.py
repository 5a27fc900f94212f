"""What one rank has of a Llama-family model, and the layers that depend on it: plain ones, or those that ranks share."""

from __future__ import annotations

from pegboard.contracts.communicator import Communicator
from pegboard.wire import World
from pegboard_plugins.layers.embedding import TokenEmbedding
from pegboard_plugins.layers.linear import Linear
from pegboard_plugins.layers.linear_methods import FusedLinearMethod
from pegboard_plugins.layers.parallel import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from pegboard_plugins.layers.sharing import Share
from pegboard_plugins.models.llama_config import LlamaConfig
from pegboard_plugins.models.llama_tensors import EMBEDDING, HEAD


class LlamaParts:
    """``share``: this rank's part of every layer. ``num_heads``, ``num_kv_heads``: its own."""

    def __init__(self, config: LlamaConfig, method: FusedLinearMethod, world: World, communicator: Communicator | None) -> None:
        """Raises ``ValueError`` for sizes that so many ranks cannot share, or ranks without a communicator."""
        if world.tp_size > 1 and communicator is None:
            raise ValueError(f"{world.tp_size} ranks that share layers need a communicator")
        self._config, self._communicator = config, communicator if world.tp_size > 1 else None
        self.method = method
        self.share = Share(world.tp_rank, world.tp_size)
        self.is_first, self.is_last = world.is_first_stage, world.is_last_stage
        self.num_heads = self.share.evenly(config.num_heads).length
        self.num_kv_heads = self.share.key_heads(config.num_kv_heads).length

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
