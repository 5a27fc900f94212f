"""ModelSpec of a decoder's checkpoint, from its configuration alone. Imports no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.plugins.parallel import undivided, undivided_heads
from pegboard_plugins.layers.rope_parameters import ignored_partial_rotary
from pegboard_plugins.loaders.safetensors_files import stored_dtype
from pegboard_plugins.models.decoder_config import DecoderConfig
from pegboard_plugins.models.decoder_tensors import layer_parameters, matrix_elements
from pegboard_plugins.models.gemma_config import gemma_config
from pegboard_plugins.models.llama_config import llama_config

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")


ReadConfig = Callable[[Mapping[str, Any], str], DecoderConfig]
"""From the content of a config.json and its name; raises ``ValueError``."""


def llama_spec(source: ModelSource) -> ModelSpec:
    """Sizes, context length, precision and EOS ids of a checkpoint. Raises ``ValueError`` naming the file and the field."""
    return _spec(source, llama_config)


def gemma_spec(source: ModelSource) -> ModelSpec:
    """As ``llama_spec``."""
    return _spec(source, gemma_config)


def _spec(source: ModelSource, read: ReadConfig) -> ModelSpec:
    where = config_file(source)
    config = read(source.config, where)
    if any(ignored_partial_rotary(source.config, rope, config.head_size) for rope in config.ropes):
        logger.warning(
            "%s: partial_rotary_factor has no effect with the default rope type in the reference implementation of %s; "
            "whole heads are rotated",
            where,
            config.architecture,
        )
    windows = [window for window in config.windows if window is not None]
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        max_model_len=config.max_model_len,
        dtype=stated_dtype(source.config, where) or stored_dtype(source),
        eos_token_ids=eos_token_ids(source, config.vocab_size),
        tie_word_embeddings=config.tie_word_embeddings,
        sliding_window=min(windows) if windows else None,
        prompt_length_rope=any(rope.depends_on_length for rope in config.ropes),
        layer_weights=matrix_elements(layer_parameters(config, "")),
        details=dict(source.config),
    )


def llama_parallel(spec: ModelSpec, ranks: int) -> list[str]:
    """What keeps ``ranks`` from sharing a layer: query heads, key heads (which ranks may have in common) and the MLP's width. The
    vocabulary is padded, and the hidden size is not shared."""
    return _parallel(spec, ranks, llama_config)


def gemma_parallel(spec: ModelSpec, ranks: int) -> list[str]:
    """As ``llama_parallel``."""
    return _parallel(spec, ranks, gemma_config)


def _parallel(spec: ModelSpec, ranks: int, read: ReadConfig) -> list[str]:
    config = read(spec.details, f"configuration of {spec.architecture}")
    return [*undivided_heads(spec, ranks), *undivided({"intermediate_size": config.intermediate_size}, ranks)]


def config_file(source: ModelSource) -> str:
    """The file that a configuration came from, for messages."""
    return os.path.join(source.path, "config.json") if os.path.isdir(source.path) else source.path


def stated_dtype(config: Mapping[str, Any], where: str) -> str | None:
    """``dtype``, or ``torch_dtype`` as older files call it, without a leading "torch."; None if neither is stated."""
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(name)
    if value is None:
        return None
    dtype = str(value).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"{where}: {name} {value!r} is not supported; weights can be {', '.join(DTYPES)}")
    return dtype


def eos_token_ids(source: ModelSource, vocab_size: int) -> tuple[int, ...]:
    """The union of what generation_config and config state, in that order. What is no id of the vocabulary is left out; the
    engine, which reads the same files, warns of it."""
    stated = (value for part in (source.generation_config, source.config) for value in _ids(part.get("eos_token_id")))
    valid = (v for v in stated if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab_size)
    return tuple(dict.fromkeys(valid))


def _ids(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)
