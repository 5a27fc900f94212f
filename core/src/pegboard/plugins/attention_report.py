"""Which attention backends serve a model on this machine, and why others do not: what a worker finds when it starts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pegboard.contracts.attention import AttentionQuery
from pegboard.plugins.attention import answers, backend_names, select_attention
from pegboard.plugins.errors import PluginError
from pegboard.wire import World

if TYPE_CHECKING:
    from pegboard.plugins.composition import Composition


def attention_data(composition: Composition) -> list[dict[str, Any]]:
    """For each kind of layers of one rank: ``layers``, how many and what they ask for; ``chosen``, the backend and the reason, or
    why there is none; ``backends``, name to "qualifies", or to what keeps it from serving them.

    Makes the model without weights, and so imports torch. Raises what making it raises.
    """
    found = []
    for query, number in Counter(_queries(composition)).items():
        backends = answers(query, composition.host)
        found.append(
            {"layers": f"{number} x {text(query)}", "chosen": _chosen(query, composition, backends), "backends": backends}
        )
    return found


def _chosen(query: AttentionQuery, composition: Composition, backends: dict[str, str]) -> str:
    setting = composition.config.attention.backend
    try:
        choice = select_attention(query, composition)
    except PluginError as error:
        unable = [name for name in backend_names(setting) if backends.get(name, "qualifies") != "qualifies"]
        return f"none: {', '.join(unable)} of attention.backend cannot serve them" if unable else f"none: {error}"
    return f"{choice.provider.name} ({choice.reasons[0].partition(': ')[2]})"


def _queries(composition: Composition) -> list[AttentionQuery]:
    import torch

    config, spec = composition.config, composition.spec
    platform = composition.create("platform")
    dtype = platform.preferred_dtype(spec.dtype) if config.dtype == "auto" else config.dtype
    kv_dtype = config.kv_cache.stored_dtype(dtype)
    ranks = config.executor.tensor_parallel_size
    model = composition.create(
        "model",
        dtype=getattr(torch, dtype),
        device=torch.device("meta"),
        world=World(tp_size=ranks),
        communicator=SimpleNamespace(rank=0, world_size=ranks) if ranks > 1 else None,  # nothing is computed
        layers=range(spec.num_layers),
    )
    scales = "head" if kv_dtype == "int8" else "none"
    return [
        AttentionQuery.of(
            layer,
            device=platform.device_type,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=config.kv_cache.block_size,
            kv_scales=scales,  # type: ignore[arg-type]
        )
        for layer in model.attention_layers
    ]


def text(query: AttentionQuery) -> str:
    """What is not the same for most models only where it is there."""
    facts = [
        f"{query.num_heads} heads and {query.num_kv_heads} key heads of {query.head_size}",
        query.dtype,
        f"cache of {query.kv_dtype} in blocks of {query.block_size}",
        f"on {query.device}",
        f"window of {query.sliding_window}" if query.sliding_window is not None else "",
        f"soft cap of {query.logits_soft_cap:g}" if query.logits_soft_cap is not None else "",
        "ALiBi" if query.alibi else "",
        "sinks" if query.sinks else "",
        f"scales per {query.kv_scales}" if query.kv_scales != "none" else "",
    ]
    return ", ".join(filter(None, facts))
