"""transformers' models against the contract of models, alone and shared by ranks and stages."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers

from pegboard.contracts.model_source import ModelSource
from pegboard.testing.conformance.model import ModelConformance
from pegboard_plugins.models.transformers.model import TransformersModel
from pegboard_plugins.models.transformers.spec import transformers_spec

SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


class _Transformers(ModelConformance):
    architecture = ""
    config = ""
    options: dict[str, Any] = {}
    _written: dict[str, torch.Tensor] | None = None

    @property
    def content(self) -> dict[str, Any]:
        made = getattr(transformers, self.config)(**SMALL, **self.options)
        return {**json.loads(made.to_json_string()), "architectures": [self.architecture]}

    def spec(self):
        return transformers_spec(ModelSource("tiny", "tiny", "dummy", "hf", self.content))

    def make(self):
        return TransformersModel(self.spec(), torch.float32, torch.device("cpu"))

    def make_rank(self, world, communicator, layers):
        return TransformersModel(self.spec(), torch.float32, torch.device("cpu"), world, communicator, layers)

    def tensors(self):
        """Names and shapes as ``test_told_tensors`` compares them with what transformers writes; values that matter."""
        generator = torch.Generator().manual_seed(1)
        return {
            name: torch.empty(shape).normal_(1.0 if len(shape) == 1 else 0.0, 0.3, generator=generator)
            for name, shape in self.written_shapes().items()
        }

    def written_shapes(self) -> dict[str, tuple[int, ...]]:
        """By transformers' own way of writing a checkpoint."""
        from transformers.core_model_loading import revert_weight_conversion

        model = getattr(transformers, self.architecture)(getattr(transformers, self.config)(**SMALL, **self.options))
        tied = model.all_tied_weights_keys
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


class TestMixtral(_Transformers):
    """Experts are single tensors in a checkpoint, and one parameter in the model."""

    architecture, config = "MixtralForCausalLM", "MixtralConfig"
    options = {"num_local_experts": 2, "num_experts_per_tok": 2}
    ranks = ((2, 1), (1, 2), (2, 2))


class TestGemma2(_Transformers):
    """A tied head, windows, soft caps."""

    architecture, config = "Gemma2ForCausalLM", "Gemma2Config"
    options = {
        "head_dim": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 8,
    }
    ranks = ((2, 1), (1, 2))


class TestPhi3(_Transformers):
    """Queries, keys and values in one weight, which ranks share all the same; frequencies by prompt length."""

    architecture, config = "Phi3ForCausalLM", "Phi3Config"
    options = {
        "pad_token_id": 0,
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    }  # fmt: skip
    ranks = ((2, 1), (1, 2))
