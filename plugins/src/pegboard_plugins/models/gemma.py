"""Gemma 2 and Gemma 3 (the text model): one model with switches (see ``gemma_config``)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from pegboard.contracts.model import ModelSpec
from pegboard.contracts.weight_loader import WeightHandle
from pegboard_plugins.models.decoder import Decoder
from pegboard_plugins.models.decoder_config import DecoderConfig
from pegboard_plugins.models.gemma_config import gemma_config

logger = logging.getLogger(__name__)

_TEXT = re.compile(r"model\.language_model\.|language_model\.(?=lm_head\.)|language_model\.model\.")
"""How names of the text model begin in checkpoints with images, of newer and older tools. The head has no other prefix."""
_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


class GemmaForCausalLM(Decoder):
    @classmethod
    def read_config(cls, spec: ModelSpec) -> DecoderConfig:
        return gemma_config(spec.details, f"configuration of {spec.architecture}")

    def load_weights(self, weights: Mapping[str, WeightHandle]) -> None:
        super().load_weights(text_part(weights))


def text_part(weights: Mapping[str, WeightHandle]) -> dict[str, WeightHandle]:
    """The handles under the names of a text checkpoint, without those of an image part."""
    found = {_text_name(name): handle for name, handle in weights.items() if not _IMAGES.match(name)}
    if left_out := len(weights) - len(found):
        logger.info("the model takes text: %d tensors of the checkpoint's image part are not loaded", left_out)
    return found


def _text_name(name: str) -> str:
    match = _TEXT.match(name)
    if match is None:
        return name
    rest = name[match.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"
