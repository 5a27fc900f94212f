"""The Llama family: Llama, SmolLM, Mistral, Qwen2 and Qwen3 are one model with switches (see ``llama_config``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.communicator import Communicator
from pegboard.contracts.model import ForwardContext, Model, ModelSpec
from pegboard.contracts.weight_loader import WeightHandle
from pegboard.wire import World
from pegboard_plugins.layers.attention import attend
from pegboard_plugins.layers.linear import GateUpLinear, Linear
from pegboard_plugins.layers.linear_methods import linear_method
from pegboard_plugins.layers.norm import QueryKeyNorm, RMSNorm
from pegboard_plugins.layers.rotary import CosSin, RotaryEmbedding
from pegboard_plugins.models.llama_config import LlamaConfig, llama_config
from pegboard_plugins.models.llama_parts import LlamaParts
from pegboard_plugins.models.llama_tensors import EMBEDDING, HEAD, NORM, layer_parameters, norm, parameters, vocabulary
from pegboard_plugins.models.weights import ParameterReader, check_tensors, name_table, warn_of_differing_head


class LlamaDecoderLayer:
    """Attention and gated MLP, each normalised before and added to the residual stream by its last product."""

    def __init__(self, config: LlamaConfig, index: int, rotary: RotaryEmbedding, parts: LlamaParts) -> None:
        self.prefix = f"model.layers.{index}"
        self.rotary = rotary
        self.num_heads, self.num_kv_heads, self.head_size = parts.num_heads, parts.num_kv_heads, config.head_size
        self.qk_width = (self.num_heads + self.num_kv_heads) * config.head_size
        self.attention = AttentionLayer(
            name=f"{self.prefix}.self_attn",
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            sliding_window=config.windows[index],
        )
        attention, mlp = f"{self.prefix}.self_attn", f"{self.prefix}.mlp"
        self.input_norm = RMSNorm(f"{self.prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.qkv = Linear(f"{attention}.qkv_proj", parts.method)
        self.qk_norm = (
            QueryKeyNorm(f"{attention}.qk_norm", self.num_heads, self.num_kv_heads, config.head_size, config.rms_norm_eps)
            if config.qk_norm
            else None
        )
        self.o = parts.second_linear(f"{attention}.o_proj")
        self.post_norm = RMSNorm(f"{self.prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.gate_up = GateUpLinear(f"{mlp}.gate_up_proj", parts.method)
        self.down = parts.second_linear(f"{mlp}.down_proj")

    def load(self, reader: ParameterReader, config: LlamaConfig, parts: LlamaParts) -> None:
        """Read this rank's part of the parameters and hand each to its module."""
        read = {p.name.removeprefix(f"{self.prefix}."): p for p in layer_parameters(config, self.prefix, parts.share)}
        self.input_norm.load(reader.read(read["input_layernorm.weight"]))
        self.post_norm.load(reader.read(read["post_attention_layernorm.weight"]))
        if self.qk_norm is not None:
            self.qk_norm.load(reader.read(read["self_attn.q_norm.weight"]), reader.read(read["self_attn.k_norm.weight"]))
        linears: dict[str, Linear | GateUpLinear] = {
            "self_attn.qkv_proj": self.qkv,
            "self_attn.o_proj": self.o,
            "mlp.gate_up_proj": self.gate_up,
            "mlp.down_proj": self.down,
        }
        for name, linear in linears.items():
            if f"{name}.bias" in read:
                linear.load_bias(reader.read(read[f"{name}.bias"]))
            linear.load_weight(reader.read(read[f"{name}.weight"]))

    def modules(self) -> Sequence[Any]:
        found = (self.input_norm, self.qkv, self.qk_norm, self.o, self.post_norm, self.gate_up, self.down)
        return [module for module in found if module is not None]

    def forward(self, hidden: torch.Tensor, cos_sin: CosSin, context: ForwardContext, out: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to the same. ``out`` [T, num_heads, head_size] is scratch space that all layers share."""
        tokens = hidden.shape[0]
        qkv = self.qkv.forward(self.input_norm.forward(hidden))
        heads = qkv[:, : self.qk_width].view(tokens, -1, self.head_size)
        if self.qk_norm is not None:
            heads = self.qk_norm.forward(heads)
        heads = self.rotary.rotate(heads, cos_sin)
        value = qkv[:, self.qk_width :].view(tokens, self.num_kv_heads, self.head_size)
        attend(self.attention, heads[:, : self.num_heads], heads[:, self.num_heads :], value, context, out)
        hidden = self.o.forward_add(out.view(tokens, self.num_heads * self.head_size), hidden)
        return self.down.forward_add(self.gate_up.forward(self.post_norm.forward(hidden)), hidden)


class LlamaForCausalLM(Model):
    """One rank's part of the model. All tensors of a step are made from its inputs; nothing is kept between steps.

    Ranks that share layers each have their heads and their part of the MLP, and exchange sums twice per layer. Stages hand on the
    residual stream as ``hidden``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        world: World | None = None,
        communicator: Communicator | None = None,
        layers: range | None = None,
    ) -> None:
        """``layers``: those of this stage, all by default."""
        self.spec, self.dtype, self.device = spec, dtype, device
        self.config = config = llama_config(spec.details, f"configuration of {spec.architecture}")
        self.parts = parts = LlamaParts(config, linear_method(device, dtype), world or World(), communicator)
        self.rotary = RotaryEmbedding(config.rope, device)
        self.embedding = parts.embedding() if parts.is_first else None
        own = range(config.num_layers) if layers is None else layers
        self.layers = [LlamaDecoderLayer(config, i, self.rotary, parts) for i in own]
        self.norm = RMSNorm(NORM.removesuffix(".weight"), config.hidden_size, config.rms_norm_eps) if parts.is_last else None
        self.head = parts.head() if parts.is_last else None
        self._attention_layers = tuple(layer.attention for layer in self.layers)

    @classmethod
    def checkpoint_tensors(cls, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        config = llama_config(spec.details, f"configuration of {spec.architecture}")
        wanted = parameters(config, with_head=not config.tie_word_embeddings)
        return {source.name: source.shape for parameter in wanted for source in parameter.sources}

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
        else:
            assert intermediate is not None, "a later stage goes on with what the one before it has computed"
            hidden = intermediate["hidden"]
        prompt_lens = context.prompt_lens
        if prompt_lens is None and context.kv_caches is None:
            prompt_lens = positions + 1  # the memory phase has tokens but no requests
        cos_sin = self.rotary.cos_sin(positions, prompt_lens, self.dtype)
        out = hidden.new_empty(hidden.shape[0], self.parts.num_heads, self.config.head_size)
        for layer in self.layers:
            hidden = layer.forward(hidden, cos_sin, context, out)
        return {"hidden": hidden} if self.norm is None else self.norm.forward(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "the last stage has the head"
        return self.head.forward(hidden)
