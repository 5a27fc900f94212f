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
from pegboard_plugins.layers.embedding import TokenEmbedding
from pegboard_plugins.layers.linear import GateUpLinear, Linear
from pegboard_plugins.layers.linear_methods import FusedLinearMethod, linear_method
from pegboard_plugins.layers.norm import QueryKeyNorm, RMSNorm
from pegboard_plugins.layers.rotary import CosSin, RotaryEmbedding
from pegboard_plugins.models.llama_config import LlamaConfig, llama_config
from pegboard_plugins.models.llama_tensors import EMBEDDING, HEAD, layer_parameters, parameters
from pegboard_plugins.models.weights import ParameterReader, check_tensors, name_table, shares_table


class LlamaDecoderLayer:
    """Attention and gated MLP, each normalised before and added to the residual stream by its last product."""

    def __init__(self, config: LlamaConfig, index: int, rotary: RotaryEmbedding, method: FusedLinearMethod) -> None:
        self.prefix = f"model.layers.{index}"
        self.rotary = rotary
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.qk_width = (config.num_heads + config.num_kv_heads) * config.head_size
        self.attention = AttentionLayer(
            name=f"{self.prefix}.self_attn",
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            sliding_window=config.windows[index],
        )
        attention, mlp = f"{self.prefix}.self_attn", f"{self.prefix}.mlp"
        self.input_norm = RMSNorm(f"{self.prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.qkv = Linear(f"{attention}.qkv_proj", method)
        self.qk_norm = (
            QueryKeyNorm(f"{attention}.qk_norm", config.num_heads, config.num_kv_heads, config.head_size, config.rms_norm_eps)
            if config.qk_norm
            else None
        )
        self.o = Linear(f"{attention}.o_proj", method)
        self.post_norm = RMSNorm(f"{self.prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.gate_up = GateUpLinear(f"{mlp}.gate_up_proj", method)
        self.down = Linear(f"{mlp}.down_proj", method)

    def load(self, reader: ParameterReader, config: LlamaConfig) -> None:
        """Read this layer's parameters and hand each to its module."""
        read = {p.name.removeprefix(f"{self.prefix}."): p for p in layer_parameters(config, self.prefix)}
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
    """One rank holds the whole model. All tensors of a step are made from its inputs; nothing is kept between steps."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        world: World | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        if world is not None and world.size > 1:
            raise ValueError(
                f"{spec.architecture} runs on one rank, but tensor_parallel_size is {world.tp_size} and "
                f"pipeline_parallel_size is {world.pp_size}; set both to 1"
            )
        self.spec, self.dtype, self.device = spec, dtype, device
        self.config = llama_config(spec.details, f"configuration of {spec.architecture}")
        method = linear_method(device, dtype)
        self.embedding = TokenEmbedding(EMBEDDING.removesuffix(".weight"))
        self.rotary = RotaryEmbedding(self.config.rope, device)
        self.layers = [LlamaDecoderLayer(self.config, i, self.rotary, method) for i in range(self.config.num_layers)]
        self.norm = RMSNorm("model.norm", self.config.hidden_size, self.config.rms_norm_eps)
        self.head = Linear(HEAD.removesuffix(".weight"), method)
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
        found = {name: tensor for module in modules for name, tensor in module.parameters()}
        if found[HEAD] is found[EMBEDDING]:
            del found[HEAD]
        return found

    def load_weights(self, weights: Mapping[str, WeightHandle]) -> None:
        tied = self.config.tie_word_embeddings
        weights = name_table(weights, tied)
        wanted = {p.name: p for p in parameters(self.config, with_head=not tied or HEAD in weights)}
        check_tensors(weights, wanted.values(), self.config.num_layers)
        tied = shares_table(weights, tied, self.dtype)
        reader = ParameterReader(weights, self.dtype, self.device)
        table = reader.read(wanted[EMBEDDING])
        self.embedding.load(table)
        for layer in self.layers:
            layer.load(reader, self.config)
        self.norm.load(reader.read(wanted["model.norm.weight"]))
        self.head.load_weight(table if tied else reader.read(wanted[HEAD]))
        reader.log_casts()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        intermediate: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        hidden = self.embedding.forward(input_ids)
        prompt_lens = context.prompt_lens
        if prompt_lens is None and context.kv_caches is None:
            prompt_lens = positions + 1  # the memory phase has tokens but no requests
        cos_sin = self.rotary.cos_sin(positions, prompt_lens, self.dtype)
        out = hidden.new_empty(hidden.shape[0], self.config.num_heads, self.config.head_size)
        for layer in self.layers:
            hidden = layer.forward(hidden, cos_sin, context, out)
        return self.norm.forward(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.forward(hidden)
