"""A transformers model without weights, from the content of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


class UnsupportedModel(ValueError):
    """A model that cannot run on paged attention. ``reasons``: one sentence each, without the model's name."""

    def __init__(self, name: str, reasons: list[str]) -> None:
        super().__init__(f"transformers' {name} cannot run on paged attention: {'; '.join(reasons)}")
        self.name, self.reasons = name, reasons


def read_config(content: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' own configuration object. Raises ``UnsupportedModel``."""
    kind, name = str(content.get("model_type") or ""), architecture_name(content)
    if kind not in CONFIG_MAPPING:
        own = "; its code is in the checkpoint, which is never run" if content.get("auto_map") else ""
        raise UnsupportedModel(name, [f"transformers {transformers.__version__} has no model_type {kind!r}{own}"])
    try:
        config = CONFIG_MAPPING[kind].from_dict(_with_floats(dict(content)))
        config.get_text_config()  # raises where there are several
    except Exception as error:  # whatever the configuration class checks
        raise UnsupportedModel(name, [f"its configuration is refused: {type(error).__name__}: {error}"]) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _with_floats(value: Any) -> Any:
    """A copy in which {"__float__": "Infinity"}, as transformers writes what JSON cannot, is a number."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def architecture_name(content: Mapping[str, Any]) -> str:
    stated = content.get("architectures") or ()
    return str(stated[0]) if stated else "model"


def model_class(content: Mapping[str, Any], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The causal language model that the checkpoint states. Raises ``UnsupportedModel`` for anything else."""
    name = architecture_name(content)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, ["it has an encoder and a decoder"])
    names = {n for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for n in ([entry] if isinstance(entry, str) else entry)}
    if name not in names:
        raise UnsupportedModel(name, [f"transformers {transformers.__version__} lists no such causal language model"])
    found: type[PreTrainedModel] = getattr(transformers, name)
    stated = set(getattr(config.get_text_config(), "layer_types", None) or ())
    strange = sorted(kind for kind in stated if "attention" not in kind or "linear" in kind)
    if strange:
        raise UnsupportedModel(
            name, [f"it has layers of type {', '.join(strange)}, which keep another state than keys and values"]
        )
    if getattr(found, "_is_stateful", False):
        raise UnsupportedModel(name, ["its layers keep a state of their own (recurrent or convolutional), not keys and values"])
    return found


def build(content: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model with its parameters and buffers on the meta device: shapes without memory. Raises ``UnsupportedModel``."""
    config = read_config(content)
    kind = model_class(content, config)
    config.use_cache = False
    try:
        with torch.device("meta"):
            # every class has eager attention; some check the name while they are made, none later
            model = kind._from_config(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # of the model's own code
        reason = f"it cannot be made from its configuration: {type(error).__name__}: {error}"
        raise UnsupportedModel(kind.__name__, [reason]) from error
    model.eval().requires_grad_(False)
    found: PreTrainedModel = model
    return found


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what is neither in a checkpoint nor a parameter, such as rotary frequencies, the way transformers does."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[union-attr]  # transformers' own mark: leave it alone
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner).register_buffer(key, torch.empty_like(buffer, device=device), persistent=False)
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()
