"""Which tensors a Llama-family checkpoint holds, and which parameter each becomes a part of. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pegboard_plugins.models.llama_config import LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: its sources, joined along their first dimension."""

    name: str
    sources: tuple[Source, ...]


def parameters(config: LlamaConfig, *, with_head: bool) -> Iterator[Parameter]:
    """All parameters, one layer after another. ``with_head``: the output head is one of its own, not the embedding table."""
    yield Parameter(EMBEDDING, (Source(EMBEDDING, (config.vocab_size, config.hidden_size)),))
    for layer in range(config.num_layers):
        yield from layer_parameters(config, f"model.layers.{layer}")
    yield _vector("model.norm.weight", config.hidden_size)
    if with_head:
        yield Parameter(HEAD, (Source(HEAD, (config.vocab_size, config.hidden_size)),))


def layer_parameters(config: LlamaConfig, prefix: str) -> Iterator[Parameter]:
    """Those of one decoder layer: queries, keys and values are fused, and so are gate and up."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_size
    attention = f"{prefix}.self_attn"
    qkv = {"q_proj": config.num_heads * head, "k_proj": config.num_kv_heads * head, "v_proj": config.num_kv_heads * head}
    yield _vector(f"{prefix}.input_layernorm.weight", hidden)
    yield from _linear(attention, "qkv_proj", qkv, hidden, config.qkv_bias)
    if config.qk_norm:
        yield _vector(f"{attention}.q_norm.weight", head)
        yield _vector(f"{attention}.k_norm.weight", head)
    yield from _linear(attention, "o_proj", {"o_proj": hidden}, config.num_heads * head, config.o_bias)
    yield _vector(f"{prefix}.post_attention_layernorm.weight", hidden)
    yield from _linear(f"{prefix}.mlp", "gate_up_proj", {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias)
    yield from _linear(f"{prefix}.mlp", "down_proj", {"down_proj": hidden}, inner, config.mlp_bias)


def _vector(name: str, size: int) -> Parameter:
    return Parameter(name, (Source(name, (size,)),))


def _linear(prefix: str, name: str, parts: dict[str, int], inputs: int, bias: bool) -> Iterator[Parameter]:
    if bias:
        yield Parameter(f"{prefix}.{name}.bias", tuple(Source(f"{prefix}.{part}.bias", (n,)) for part, n in parts.items()))
    yield Parameter(f"{prefix}.{name}.weight", tuple(Source(f"{prefix}.{part}.weight", (n, inputs)) for part, n in parts.items()))
