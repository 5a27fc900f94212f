"""The description of a transformers model, and how a process without torch gets it."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pegboard.config import EngineConfig

_PATIENCE = 600.0
"""Seconds for a process that imports torch and transformers and makes a model without weights."""


@dataclass(frozen=True, slots=True)
class Description:
    """Sizes as in ``ModelSpec``, and who may share the model.

    ``sharing_reasons``: what keeps any ranks from sharing a layer. ``sharing_sizes``: what their number must divide, by name;
    ``shares_heads``: heads too. ``stage_reasons``: what keeps pipeline stages from sharing the layers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    eos_token_ids: list[int]
    tie_word_embeddings: bool
    sliding_window: int | None
    prompt_length_rope: bool
    layer_weights: int
    sharing_reasons: list[str]
    sharing_sizes: dict[str, int]
    shares_heads: bool
    stage_reasons: list[str]

    def data(self) -> dict[str, Any]:
        return asdict(self)


def describe_model(content: Mapping[str, Any], config: EngineConfig | None = None) -> Description | list[str]:
    """The description of the model that a config.json says, or why it cannot be run.

    Done in this process where torch is imported anyway: if it is already, or if ``config`` puts the one worker here. Otherwise
    in a process of its own, as one that starts workers does without torch.
    """
    if reasons := _plain_reasons(content):
        return reasons
    here = "torch" in sys.modules or (config is not None and _worker_is_here(config))
    return _described(json.dumps(content, sort_keys=True, default=str), here)


def _plain_reasons(content: Mapping[str, Any]) -> list[str]:
    """What can be told without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return ["transformers is not installed: pip install 'pegboard-plugins[transformers]'"]
    if quantised := content.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        return [f"its weights are quantised ({method}), and are read here only as they are computed with"]
    return []


def _worker_is_here(config: EngineConfig) -> bool:
    settings = config.executor
    return settings.tensor_parallel_size * settings.pipeline_parallel_size == 1 and settings.name in ("auto", "uniproc")


@functools.lru_cache(maxsize=8)
def _described(content: str, here: bool) -> Description | list[str]:
    if here:
        from pegboard_plugins.models.transformers.build import UnsupportedModel
        from pegboard_plugins.models.transformers.describe import describe

        try:
            return describe(json.loads(content))
        except UnsupportedModel as refusal:
            return refusal.reasons
    command = [sys.executable, "-m", "pegboard_plugins.models.transformers.describe"]
    try:
        run = subprocess.run(command, input=content, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"describing the model took more than {_PATIENCE:g} s: {' '.join(command)}") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"describing the model failed: {error.stderr.strip()[-2000:]}") from error
    answer = json.loads(run.stdout)
    return answer["reasons"] if "reasons" in answer else Description(**answer["description"])
