"""Which tensors a decoder's checkpoint holds, and which parameter each becomes a part of. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from pegboard_plugins.layers.sharing import WHOLE, Share, Span
from pegboard_plugins.models.decoder_config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank reads of a tensor: a span along one dimension."""

    dim: int
    span: Span


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a checkpoint. ``part``: what this rank reads of it; None: all."""

    name: str
    shape: tuple[int, ...]
    part: Part | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what this rank reads."""
        if self.part is None:
            return self.shape
        return tuple(self.part.span.length if dim == self.part.dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: its sources, joined along their first dimension, and zeros up to ``rows`` if that is more."""

    name: str
    sources: tuple[Source, ...]
    rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """As this rank holds it."""
        read = sum(source.part_shape[0] for source in self.sources)
        return (max(self.rows, read), *self.sources[0].part_shape[1:])


def parameters(config: DecoderConfig, *, with_head: bool) -> Iterator[Parameter]:
    """All parameters of the whole model. ``with_head``: the output head is one of its own, not the embedding table."""
    yield vocabulary(config, EMBEDDING)
    for layer in range(config.num_layers):
        yield from layer_parameters(config, f"model.layers.{layer}")
    yield norm(config)
    if with_head:
        yield vocabulary(config, HEAD)


def vocabulary(config: DecoderConfig, name: str, share: Share = WHOLE) -> Parameter:
    """The embedding table or the head: a row for each id, the same number on every rank."""
    span = share.up_to(config.vocab_size)
    source = Source(name, (config.vocab_size, config.hidden_size), _part(0, span, share))
    return Parameter(name, (source,), share.padded(config.vocab_size))


def norm(config: DecoderConfig) -> Parameter:
    """The one behind the last layer."""
    return _vector(NORM, config.hidden_size)


def layer_parameters(config: DecoderConfig, prefix: str, share: Share = WHOLE) -> Iterator[Parameter]:
    """Those of one decoder layer: queries, keys and values are fused, and so are gate and up."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query, key = share.evenly(config.num_heads).times(head), share.key_heads(config.num_kv_heads).times(head)
    keys = (config.num_kv_heads * head, key)
    qkv = {"q_proj": (config.num_heads * head, query), "k_proj": keys, "v_proj": keys}
    columns = share.evenly(inner)
    gate_up = {"gate_proj": (inner, columns), "up_proj": (inner, columns)}
    for norm_name in config.norms.names:
        yield _vector(f"{prefix}.{norm_name}.weight", hidden)
    yield from _shared_outputs(attention, "qkv_proj", qkv, hidden, config.qkv_bias, share)
    if config.qk_norm:
        yield _vector(f"{attention}.q_norm.weight", head)
        yield _vector(f"{attention}.k_norm.weight", head)
    yield from _shared_inputs(attention, "o_proj", (hidden, config.num_heads * head), query, config.o_bias, share)
    yield from _shared_outputs(mlp, "gate_up_proj", gate_up, hidden, config.mlp_bias, share)
    yield from _shared_inputs(mlp, "down_proj", (hidden, inner), columns, config.mlp_bias, share)


def matrix_elements(found: Iterable[Parameter]) -> int:
    """Of all that a token is multiplied by."""
    return sum(prod(source.shape) for parameter in found for source in parameter.sources if len(source.shape) == 2)


def _vector(name: str, size: int) -> Parameter:
    return Parameter(name, (Source(name, (size,)),))


def _shared_outputs(
    prefix: str, name: str, parts: Mapping[str, tuple[int, Span]], inputs: int, bias: bool, share: Share
) -> Iterator[Parameter]:
    """``parts``: name to outputs, and those that this rank computes."""
    if bias:
        vectors = (Source(f"{prefix}.{part}.bias", (size,), _part(0, span, share)) for part, (size, span) in parts.items())
        yield Parameter(f"{prefix}.{name}.bias", tuple(vectors))
    weights = (Source(f"{prefix}.{part}.weight", (size, inputs), _part(0, span, share)) for part, (size, span) in parts.items())
    yield Parameter(f"{prefix}.{name}.weight", tuple(weights))


def _shared_inputs(prefix: str, name: str, shape: tuple[int, int], span: Span, bias: bool, share: Share) -> Iterator[Parameter]:
    """``span``: the inputs that this rank has. The bias is added once."""
    if bias and share.rank == 0:
        yield _vector(f"{prefix}.{name}.bias", shape[0])
    yield Parameter(f"{prefix}.{name}.weight", (Source(f"{prefix}.{name}.weight", shape, _part(1, span, share)),))


def _part(dim: int, span: Span, share: Share) -> Part | None:
    return Part(dim, span) if share.size > 1 else None
