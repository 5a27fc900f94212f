"""Sampling parameters that a model's generation_config recommends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pegboard.wire import SamplingParams

log = logging.getLogger(__name__)

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key in generation_config to field of SamplingParams."""


def recommended_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``SamplingParams`` that ``generation_config`` sets. ``do_sample: false`` means temperature 0. A value that
    SamplingParams refuses is left out with a warning: a bad file must not make a model unusable."""
    fields = {ours: generation_config[theirs] for theirs, ours in _FIELDS.items() if generation_config.get(theirs) is not None}
    if generation_config.get("do_sample") is False:
        fields["temperature"] = 0.0
    for name in list(fields):
        try:
            SamplingParams(**{name: fields[name]})
        except ValueError as error:
            log.warning("the model's generation_config recommends what cannot be used, and is ignored there: %s", error)
            del fields[name]
    return fields
