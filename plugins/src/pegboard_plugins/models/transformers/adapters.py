"""Changes that some models need before they can run on paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel

from pegboard_plugins.models.transformers.alibi import (
    InterfacedBloomAttention,
    InterfacedMptAttention,
    PlacedBloomModel,
    PlacedMptModel,
    attend_with_slopes,
    falcon_slopes,
)
from pegboard_plugins.models.transformers.attention import Step
from pegboard_plugins.models.transformers.build import build
from pegboard_plugins.models.transformers.linear import use_engine_linear
from pegboard_plugins.models.transformers.rope import rope_by_prompt


class InterfacedFalconAttention(FalconAttention):
    """Falcon's attention, which calls the kernels itself. In its newer form each key head is broadcast to the query heads that it
    serves; here it stays one."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        query, key, value = (x.transpose(1, 2) for x in self._split(self.query_key_value(hidden_states)))
        if self.config.alibi:
            slopes = falcon_slopes(self.num_heads, self.inv_norm_factor)
            out = attend_with_slopes(self, (query, key, value), attention_mask, self.inv_norm_factor, slopes)
            return self.dense(out), None
        assert position_embeddings is not None, "the model makes them"
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _weights = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor)
        return self.dense(out.flatten(2)), None

    def _split(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[1, T, queries, keys and values] to three [1, T, heads, head_size]."""
        if not self.new_decoder_architecture:
            query, key, value = self._split_heads(fused)
            return query, key, value
        groups = fused.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


REPLACED: Final[dict[type, type]] = {
    FalconAttention: InterfacedFalconAttention,
    BloomAttention: InterfacedBloomAttention,
    BloomModel: PlacedBloomModel,
    MptAttention: InterfacedMptAttention,
    MptModel: PlacedMptModel,
}
"""Modules that do not go through transformers' attention interface, or keep their positions from it, and what does in their
place."""


def prepare(content: Mapping[str, Any], dtype: torch.dtype, step: Step) -> PreTrainedModel:
    """The model of a config.json, on the meta device, as it is run. Raises ``UnsupportedModel``."""
    model = build(content, dtype)
    for module in model.modules():
        if type(module) in REPLACED:
            module.__class__ = REPLACED[type(module)]
            if not hasattr(module, "config"):
                module.config = model.config
        if isinstance(module, FalconModel):
            module.use_alibi = False  # else it adds the biases to the mask; attention has the slopes
    rope_by_prompt(model, step)
    use_engine_linear(model)
    return model
