"""Looks into a transformers model: runs it once without values, and notes how it calls attention and where its head begins.

The run is on the meta device: it costs no memory and little time for models of any size. What it cannot see, whether tokens
influence one another outside of attention, is checked with the weights (see ``transformers.model``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pegboard.contracts.attention import AttentionLayer
from pegboard_plugins.models.transformers.alibi import SLOPES
from pegboard_plugins.models.transformers.attention import PAGED
from pegboard_plugins.models.transformers.build import UnsupportedModel
from pegboard_plugins.models.transformers.masks import meaning

_PROBE: Final = "pegboard_probe"
_TOKENS: Final = 7
_PASSED_BY: Final = frozenset({
    "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "layer_idx", "position_embeddings",
    "sliding_window", "cache", "past_key_values", "logits_to_keep", "deterministic", "output_router_logits",
})  # fmt: skip
"""Arguments of attention that change nothing here. ``sliding_window`` is for kernels that take no mask: the mask tells it too."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One attention module, and the call that it made. ``sinks``: name of the parameter, if it has any."""

    module: torch.nn.Module
    layer: AttentionLayer
    sinks: str | None = None


@dataclass(slots=True)
class Anatomy:
    """``body``: path of the module that holds all attention, and whose output the head takes. ``output``: the class of what it
    returns. ``positions``: whether it takes position ids."""

    body: str
    output: type
    hidden_size: int
    vocab_size: int
    layers: list[LayerCall]
    called: frozenset[torch.nn.Module]
    """The modules that were called; of others, parameters may be used directly."""


@dataclass(slots=True)
class _Record:
    """What happens in the run."""

    calls: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any, dict[str, Any]]] = field(
        default_factory=list
    )
    masks: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    """By identity; the tensor is kept so that its identity stays its own."""
    stack: list[torch.nn.Module] = field(default_factory=list)
    called: set[torch.nn.Module] = field(default_factory=set)
    parts: list[tuple[torch.nn.Module, dict[str, Any], Any, int]] = field(default_factory=list)
    """What the model itself calls: module, keyword arguments, result, and attention calls made in it."""


_record: ContextVar[_Record] = ContextVar("record")


def _note_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *_: Any,
    **kw: Any,
) -> tuple[torch.Tensor, None]:
    _record.get().calls.append((module, query, key, value, attention_mask, kw))
    batch, heads, tokens, _size = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _note_mask(*, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> torch.Tensor:
    mask = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    _record.get().masks[id(mask)] = (mask, mask_function)
    return mask


AttentionInterface.register(_PROBE, _note_call)
AttentionMaskInterface.register(_PROBE, _note_mask)


def look_into(model: PreTrainedModel, num_layers: int) -> Anatomy:
    """Run ``model``, which is on the meta device and has ``num_layers`` layers, once. Raises ``UnsupportedModel`` with every
    reason found.

    Leaves the model with paged attention as its attention.
    """
    name, record = type(model).__name__, _Record()
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    given = {"input_ids": ids, "position_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    config = model.config
    experts = getattr(config, "_experts_implementation", None)
    config._attn_implementation = _PROBE
    config._experts_implementation = "batched_mm"  # the others look at values
    try:
        with _watched(model, record), torch.no_grad():
            result = model(**given, use_cache=False)
    except Exception as error:  # of the model's own code
        raise UnsupportedModel(name, [_failure(error, record)]) from error
    finally:
        config._attn_implementation, config._experts_implementation = PAGED, experts
    return _judged(model, num_layers, record, result, given)


@contextmanager
def _watched(model: PreTrainedModel, record: _Record) -> Iterator[None]:
    def enter(module: torch.nn.Module, args: Any) -> None:
        record.stack.append(module)
        record.called.add(module)
        starts.append(len(record.calls))

    def leave(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        record.stack.pop()
        made = len(record.calls) - starts.pop()
        if len(record.stack) == 1:
            record.parts.append((module, kwargs, output, made))

    starts: list[int] = []
    token = _record.set(record)
    with ExitStack() as stack:
        stack.callback(_record.reset, token)
        for module in model.modules():
            stack.enter_context(_removed(module.register_forward_pre_hook(enter)))
            stack.enter_context(_removed(module.register_forward_hook(leave, with_kwargs=True)))
        yield


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _failure(error: Exception, record: _Record) -> str:
    where = type(record.stack[-1]).__name__ if record.stack else "it"
    told = str(error).partition("\n")[0][:300]
    return f"a run without values and without a cache failed in {where}: {type(error).__name__}: {told}"


def _judged(model: PreTrainedModel, count: int, record: _Record, result: Any, given: Mapping[str, torch.Tensor]) -> Anatomy:
    name, paths = type(model).__name__, {module: path for path, module in model.named_modules()}
    modules = [call[0] for call in record.calls]
    if len(set(modules)) != count or len(modules) != count:
        raise UnsupportedModel(name, [_uneven(count, modules)])
    reasons: list[str] = []
    layers = [_layer(model, paths[call[0]], call, record, reasons) for call in record.calls]
    reasons += _around(model, record, result, given)
    if reasons:
        raise UnsupportedModel(name, list(dict.fromkeys(reasons)))
    module, _, output, _ = next(part for part in record.parts if part[3])
    return Anatomy(paths[module], type(output), output[0].shape[-1], result.logits.shape[-1], layers, frozenset(record.called))


def _uneven(count: int, modules: list[torch.nn.Module]) -> str:
    """``count``: layers; ``modules``: those that called attention."""
    if not modules:
        return "none of its layers calls the attention interface: they attend in their own way, or not at all"
    calling = len(set(modules))
    if calling == len(modules):
        return f"{calling} of its {count} layers call the attention interface: the others keep another state than keys and values"
    return f"{calling} modules of its {count} layers call the attention interface {len(modules)} times, where each does once"


def _layer(model: PreTrainedModel, path: str, call: Any, record: _Record, reasons: list[str]) -> LayerCall:
    module, query, key, value, mask, options = call
    shapes = [tuple(x.shape) for x in (query, key, value)]
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[-1]
    expected = [(1, heads, _TOKENS, size), (1, kv_heads, _TOKENS, size), (1, kv_heads, _TOKENS, size)]
    if shapes != expected or heads % kv_heads:
        reasons.append(f"its queries, keys and values are {shapes} for {_TOKENS} tokens, where heads of one size are expected")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        reasons.append("its attention is not causal: tokens see those after them")
    window = None
    if id(mask) not in record.masks:
        reasons.append("it gives attention a mask of its own making" if mask is not None else "it gives attention no causal mask")
    elif (seen := meaning(record.masks[id(mask)][1])) is None:
        reasons.append("its mask is neither causal nor a sliding window")
    else:
        window = seen.window
    scale, cap = options.pop("scaling", None), options.pop("softcap", None)
    sinks = _sinks(model, options.pop("s_aux", None), heads, reasons)
    slopes = options.pop(SLOPES, None)
    if isinstance(scale, torch.Tensor):
        reasons.append("the scale of its attention is computed in each step")
    strange = sorted(k for k, v in options.items() if k not in _PASSED_BY and v is not None and v is not False)
    if strange:
        reasons.append(f"it gives attention {', '.join(strange)}, which paged attention does not have")
    layer = AttentionLayer(
        name=path,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        scale=float(size**-0.5 if scale is None or isinstance(scale, torch.Tensor) else scale),
        sliding_window=window,
        logits_soft_cap=None if cap is None else float(cap),
        alibi_slopes=slopes,
    )
    return LayerCall(module, layer, sinks)


def _sinks(model: PreTrainedModel, sinks: torch.Tensor | None, heads: int, reasons: list[str]) -> str | None:
    """The parameter that holds them."""
    if sinks is None:
        return None
    found = [name for name, parameter in model.named_parameters() if parameter is sinks]
    if not found or tuple(sinks.shape) != (heads,):
        reasons.append("its attention sinks are computed in each step, or are not one number per head")
        return None
    return found[0]


def _around(model: PreTrainedModel, record: _Record, result: Any, given: Mapping[str, torch.Tensor]) -> list[str]:
    """What keeps body and head from being run apart."""
    bodies = [part for part in record.parts if part[3]]
    if len(bodies) != 1:
        return [f"its attention is in {len(bodies)} modules that it calls itself, where one body before one head is expected"]
    module, kwargs, output, _ = bodies[0]
    reasons = []
    if "position_ids" not in inspect.signature(module.forward).parameters:
        reasons.append("it takes no position ids, and counts tokens from the first of a batch")
    differing = [k for k, v in given.items() if k in kwargs and kwargs[k] is not v]
    more = [k for k, v in kwargs.items() if k not in given and isinstance(v, torch.Tensor)]
    if differing or more:
        reasons.append(f"it computes {', '.join(differing + more)} before its body")
    hidden = output[0] if isinstance(output, tuple | Mapping) or hasattr(output, "last_hidden_state") else None
    if not isinstance(hidden, torch.Tensor) or tuple(hidden.shape[:2]) != (1, _TOKENS):
        reasons.append("its body does not return one hidden state per token")
    logits = getattr(result, "logits", None)
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape[:2]) != (1, _TOKENS):
        reasons.append("it does not return logits for each token")
    return reasons
