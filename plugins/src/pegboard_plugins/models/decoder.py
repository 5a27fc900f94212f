"""The decoder that families of models share: everything that differs between them is in ``DecoderConfig``."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.communicator import Communicator
from pegboard.contracts.model import ForwardContext, Model, ModelSpec
from pegboard.contracts.weight_loader import WeightHandle
from pegboard.wire import World
from pegboard_plugins.layers.linear_methods import linear_method
from pegboard_plugins.layers.rope_parameters import RopeParameters
from pegboard_plugins.layers.rotary import RotaryEmbedding
from pegboard_plugins.models.decoder_config import DecoderConfig
from pegboard_plugins.models.decoder_layer import DecoderLayer
from pegboard_plugins.models.decoder_parts import DecoderParts
from pegboard_plugins.models.decoder_tensors import EMBEDDING, HEAD, NORM, norm, parameters, vocabulary
from pegboard_plugins.models.weights import ParameterReader, check_tensors, name_table, warn_of_differing_head


class Decoder(Model):
    """One rank's part of the model. All tensors of a step are made from its inputs; nothing is kept between steps.

    Ranks that share layers each have their heads and their part of the MLP, and exchange sums twice per layer. Stages hand on the
    residual stream as ``hidden``. Families say how their configuration is read.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        world: World | None = None,
        communicator: Communicator | None = None,
        layers: range | None = None,
        compiled: bool = False,
    ) -> None:
        """``layers``: those of this stage, all by default."""
        self.spec, self.dtype, self.device = spec, dtype, device
        self.config = config = self.read_config(spec)
        self.parts = parts = DecoderParts(config, linear_method(device, dtype, compiled), world or World(), communicator)
        own = range(config.num_layers) if layers is None else layers
        ropes = _distinct([config.ropes[i] for i in own])
        self.rotaries = [RotaryEmbedding(rope, device) for rope in ropes]
        self.embedding = parts.embedding() if parts.is_first else None
        self.embedding_scale = _rounded(config.embedding_scale, dtype)
        self.layers = [DecoderLayer(config, i, self.rotaries[ropes.index(config.ropes[i])], parts) for i in own]
        self.norm = parts.norm(NORM.removesuffix(".weight")) if parts.is_last else None
        self.head = parts.head() if parts.is_last else None
        self._attention_layers = tuple(layer.attention for layer in self.layers)

    @classmethod
    @abc.abstractmethod
    def read_config(cls, spec: ModelSpec) -> DecoderConfig:
        """From ``spec.details``. Raises ``ValueError`` for what the family does not support."""

    @classmethod
    def checkpoint_tensors(cls, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        config = cls.read_config(spec)
        wanted = parameters(config, with_head=not config.tie_word_embeddings)
        return {source.name: source.shape for parameter in wanted for source in parameter.sources}

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """Frequencies that depend on length are made from numbers on the host."""
        return not any(rope.depends_on_length for rope in self.config.ropes)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        return self._attention_layers

    def parameters(self) -> dict[str, torch.Tensor]:
        """The run-time tensors by name, fused and packed as they are used, each once: a tied head that needs no form of its own
        is the embedding table and not listed again."""
        modules = [self.embedding, *(m for layer in self.layers for m in layer.modules()), self.norm, self.head]
        found = {name: tensor for module in modules if module is not None for name, tensor in module.parameters()}
        if HEAD in found and found[HEAD] is found.get(EMBEDDING):
            del found[HEAD]
        return found

    def load_weights(self, weights: Mapping[str, WeightHandle]) -> None:
        config, share = self.config, self.parts.share
        weights = name_table(weights, config.tie_word_embeddings)
        wanted = parameters(config, with_head=not config.tie_word_embeddings or HEAD in weights)
        check_tensors(weights, wanted, config.num_layers)
        reader = ParameterReader(weights, self.dtype, self.device)
        table = None
        if self.embedding is not None:
            table = reader.read(vocabulary(config, EMBEDDING, share))
            self.embedding.load(table)
        for layer in self.layers:
            layer.load(reader, config, self.parts)
        if self.norm is not None:
            self.norm.load(reader.read(norm(config)))
        if self.head is not None:
            self.head.load_weight(self._head_weight(reader, table))
        reader.log_casts()

    def _head_weight(self, reader: ParameterReader, table: torch.Tensor | None) -> torch.Tensor:
        """This rank's rows of the head, or of the table if they are tied. ``table``: those of the table, where it has them."""
        own = None
        if not self.config.tie_word_embeddings or HEAD in reader.weights:
            own = reader.read(vocabulary(self.config, HEAD, self.parts.share))
            if not self.config.tie_word_embeddings:
                return own
        if table is None:
            table = reader.read(vocabulary(self.config, EMBEDDING, self.parts.share))
        if own is None or torch.equal(own, table):
            return table
        warn_of_differing_head()
        return own

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        intermediate: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if self.embedding is not None:
            hidden = self.embedding.forward(input_ids)
            if self.embedding_scale is not None:
                hidden = hidden * self.embedding_scale
        else:
            assert intermediate is not None, "a later stage goes on with what the one before it has computed"
            hidden = intermediate["hidden"]
        prompt_lens = context.prompt_lens
        if prompt_lens is None and context.kv_caches is None:
            prompt_lens = positions + 1  # the memory phase has tokens but no requests
        cos_sin = {rotary: rotary.cos_sin(positions, prompt_lens, self.dtype) for rotary in self.rotaries}
        out = hidden.new_empty(hidden.shape[0], self.parts.num_heads, self.config.head_size)
        for layer in self.layers:
            hidden = layer.forward(hidden, cos_sin[layer.rotary], context, out)
        return {"hidden": hidden} if self.norm is None else self.norm.forward(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "the last stage has the head"
        logits, cap = self.head.forward(hidden), self.config.logit_soft_cap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)


def _distinct(ropes: Sequence[RopeParameters]) -> list[RopeParameters]:
    found: list[RopeParameters] = []
    for rope in ropes:
        if rope not in found:
            found.append(rope)
    return found


def _rounded(scale: float | None, dtype: torch.dtype) -> float | None:
    """To ``dtype``, where sqrt(3072) becomes 55.5 in bfloat16: checkpoints were trained with that."""
    return None if scale is None else float(torch.tensor(scale, dtype=torch.float32).to(dtype))
