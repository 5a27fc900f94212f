"""transformers' models with ALiBi, which attend in their own way: here through the attention interface, with the slopes of their
heads. The biases that the models compute for a whole sequence are left aside."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_biases
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_biases
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, build_mpt_alibi_tensor

SLOPES = "alibi_slopes"
"""The argument with which attention is called: a number per head."""


@functools.lru_cache
def bloom_slopes(num_heads: int) -> torch.Tensor:
    """[num_heads] float32, on the processor: what transformers adds to the score of the second key."""
    return bloom_biases(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, 0, 1]


@functools.lru_cache
def falcon_slopes(num_heads: int, scale: float) -> torch.Tensor:
    """As ``bloom_slopes``, but rounded to bfloat16, and scaled as the scores are. transformers also rounds their products with
    positions to 8 bits; these are exact."""
    return falcon_biases(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, 0, 1] * scale


@functools.lru_cache
def mpt_slopes(num_heads: int) -> torch.Tensor:
    """As ``bloom_slopes``: the bias of the key before the last one is a step back."""
    return -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0]


def attend_with_slopes(
    module: Any, heads: tuple[torch.Tensor, ...], mask: torch.Tensor | None, scale: float, slopes: torch.Tensor
) -> torch.Tensor:
    """Query, key and value, each [1, heads, T, head_size], to [1, T, heads * head_size]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    out, _weights = attend(module, *heads, mask, scaling=scale, **{SLOPES: slopes})
    return out.flatten(2)


class InterfacedBloomAttention(BloomAttention):
    """``config`` is put here by the adapter: transformers' module keeps none."""

    config: Any

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: Any, attention_mask: torch.Tensor | None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        heads = self._reshape(self.query_key_value(hidden_states))
        out = attend_with_slopes(self, heads, attention_mask, self.inv_norm_factor, bloom_slopes(self.num_heads))
        return self.dense(out) + residual, None


class PlacedBloomModel(BloomModel):
    """Takes position ids, which it does not need: attention alone knows how far tokens are apart."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class InterfacedMptAttention(MptAttention):
    """As ``InterfacedBloomAttention``."""

    config: Any

    def forward(
        self, hidden_states: torch.Tensor, position_bias: Any, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        heads = tuple(x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
        out = attend_with_slopes(self, heads, attention_mask, float(self.softmax_scale), mpt_slopes(self.n_heads))
        return self.out_proj(out), None


class PlacedMptModel(MptModel):
    """Without biases, and with the mask that the attention in use asks for, which may be none."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: Any = None, **_: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        hidden = self.wte(input_ids)
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, cache=None)
        for block in self.blocks:
            hidden, _weights = block(hidden, position_bias=None, attention_mask=mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm_f(hidden))
