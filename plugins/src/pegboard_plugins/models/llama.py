"""The Llama family: Llama, SmolLM, Mistral, Qwen2 and Qwen3 are one model with switches (see ``llama_config``)."""

from __future__ import annotations

from pegboard.contracts.model import ModelSpec
from pegboard_plugins.models.decoder import Decoder
from pegboard_plugins.models.decoder_config import DecoderConfig
from pegboard_plugins.models.llama_config import llama_config


class LlamaForCausalLM(Decoder):
    @classmethod
    def read_config(cls, spec: ModelSpec) -> DecoderConfig:
        return llama_config(spec.details, f"configuration of {spec.architecture}")
