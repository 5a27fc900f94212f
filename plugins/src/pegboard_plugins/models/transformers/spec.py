"""What the provider of transformers' models says without torch: checkpoints it accepts, their spec, and who may share them."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.config import EngineConfig
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins.parallel import undivided
from pegboard_plugins.loaders.safetensors_files import stored_dtype
from pegboard_plugins.models.spec import config_file, eos_token_ids, stated_dtype
from pegboard_plugins.models.transformers.description import Description, describe_model


def transformers_refusals(source: ModelSource, config: EngineConfig) -> Iterable[str]:
    """Why transformers' model cannot run on paged attention; nothing if it can."""
    found = describe_model(source.config, config)
    return found if isinstance(found, list) else []


def transformers_spec(source: ModelSource) -> ModelSpec:
    """Raises ``ValueError`` for a checkpoint that is refused, and for a dtype that weights cannot have."""
    where = config_file(source)
    found = describe_model(source.config)
    if isinstance(found, list):
        raise ValueError(f"{where}: transformers cannot run it on paged attention: {'; '.join(found)}")
    return ModelSpec(
        architecture=found.architecture,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        num_layers=found.num_layers,
        num_heads=found.num_heads,
        num_kv_heads=found.num_kv_heads,
        head_size=found.head_size,
        max_model_len=found.max_model_len,
        dtype=stated_dtype(source.config, where) or stored_dtype(source),
        eos_token_ids=eos_token_ids(source, found.vocab_size) or tuple(found.eos_token_ids),
        tie_word_embeddings=found.tie_word_embeddings,
        sliding_window=found.sliding_window,
        prompt_length_rope=found.prompt_length_rope,
        layer_weights=found.layer_weights,
        details=dict(source.config),
    )


def transformers_parallel(spec: ModelSpec, ranks: int) -> list[str]:
    """What keeps ``ranks`` from sharing a layer by transformers' plan."""
    found = _description(spec)
    heads = {"num_attention_heads": found.num_heads, "num_key_value_heads": found.num_kv_heads} if found.shares_heads else {}
    return found.sharing_reasons or undivided({**heads, **found.sharing_sizes}, ranks)


def transformers_stages(spec: ModelSpec, stages: int) -> list[str]:
    """What keeps pipeline stages from sharing the layers by transformers' plan."""
    return _description(spec).stage_reasons


def _description(spec: ModelSpec) -> Description:
    found = describe_model(spec.details)
    assert isinstance(found, Description), "a spec is only made of what is accepted"
    return found
