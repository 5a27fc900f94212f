"""What an engine has to know of a transformers model before it starts: made and run once without weights.

``python -m pegboard_plugins.models.transformers.describe`` reads the content of a config.json and writes the description, for
processes that must stay without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from pegboard.contracts.attention import AttentionLayer
from pegboard_plugins.layers.rope_parameters import rope_parameters
from pegboard_plugins.layers.sharing import Share
from pegboard_plugins.models.transformers.adapters import prepare
from pegboard_plugins.models.transformers.anatomy import look_into
from pegboard_plugins.models.transformers.attention import Step
from pegboard_plugins.models.transformers.build import UnsupportedModel
from pegboard_plugins.models.transformers.description import Description
from pegboard_plugins.models.transformers.rope import depends_on_length
from pegboard_plugins.models.transformers.sharing import Joint, SharingTerms, share_model, sharing_terms
from pegboard_plugins.models.transformers.stages import StagePlan

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def describe(content: Mapping[str, Any]) -> Description:
    """``content``: of a config.json. Raises ``UnsupportedModel``."""
    model = prepare(content, torch.float32, Step())
    config, name = model.config.get_text_config(), type(model).__name__
    num_layers = getattr(config, "num_hidden_layers", None)
    if not num_layers:
        raise UnsupportedModel(name, ["its configuration does not tell its number of layers"])
    anatomy = look_into(model, num_layers)
    layers = [call.layer for call in anatomy.layers]
    first, windows = layers[0], [w for layer in layers if (w := layer.sliding_window) is not None]
    terms = sharing_terms(model, frozenset(layer.name for layer in layers))
    stages = StagePlan(model)
    eos = getattr(config, "eos_token_id", None)
    return Description(
        architecture=name,
        vocab_size=anatomy.vocab_size,
        hidden_size=anatomy.hidden_size,
        num_layers=num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        max_model_len=_max_model_len(config, name),
        eos_token_ids=[] if eos is None else eos if isinstance(eos, list) else [eos],
        tie_word_embeddings=bool(model.all_tied_weights_keys),
        sliding_window=min(windows) if windows else None,
        prompt_length_rope=depends_on_length(model),
        layer_weights=_layer_weights(model, stages, num_layers),
        sharing_reasons=terms.reasons or _tried_sharing(content, first, terms, num_layers),
        sharing_sizes=terms.sizes,
        shares_heads=terms.heads,
        stage_reasons=stages.problems(model, num_layers, anatomy.hidden_size),
    )


def _tried_sharing(content: Mapping[str, Any], layer: AttentionLayer, terms: SharingTerms, num_layers: int) -> list[str]:
    """What goes wrong when the fewest ranks share the model that can: a plan need not cover everything that depends on heads."""
    counts = [*terms.sizes.values(), *((layer.num_heads, layer.num_kv_heads) if terms.heads else ())]
    ranks = next((n for n in range(2, layer.num_heads + 1) if not any(count % n for count in counts)), None)
    if ranks is None:
        return []
    model = prepare(content, torch.float32, Step())
    try:
        share_model(model, Joint(Share(0, ranks)))
        look_into(model, num_layers)
    except ValueError as error:
        told = "; ".join(error.reasons) if isinstance(error, UnsupportedModel) else str(error)
        return [f"transformers' plan for sharing the layers of {type(model).__name__} does not work out: {told}"]
    return []


def _max_model_len(config: Any, name: str) -> int:
    """As the rotary scaling makes it, or as stated."""
    try:
        return rope_parameters(config.to_dict(), 64, "").max_model_len
    except ValueError:  # no rotary embeddings, or of a kind of its own
        found = next((value for key in _LENGTHS if (value := getattr(config, key, None))), None)
    if not isinstance(found, int):
        raise UnsupportedModel(name, [f"its configuration states no context length ({', '.join(_LENGTHS)})"])
    return found


def _layer_weights(model: PreTrainedModel, stages: StagePlan, num_layers: int) -> int:
    """Of a layer of average size; of experts, those that a token goes to. 0 where layers are no part that a plan names."""
    if len(stages.layers) != 1:
        return 0
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    total = 0.0
    for parameter in model.get_submodule(stages.layers[0]).parameters():
        if parameter.ndim == 2:
            total += parameter.numel()
        elif parameter.ndim == 3:
            total += parameter.numel() * min(1.0, (chosen or parameter.shape[0]) / parameter.shape[0])
    return int(total / num_layers)


if __name__ == "__main__":
    try:
        json.dump({"description": describe(json.load(sys.stdin)).data()}, sys.stdout)
    except UnsupportedModel as refusal:
        json.dump({"reasons": refusal.reasons}, sys.stdout)
