"""Which token ids end an answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pegboard.contracts.model import ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def eos_token_ids(spec: ModelSpec, source: ModelSource, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The union of what generation_config, config and tokenizer say, in this order. No source overrides another: an answer
    that runs on because one file forgot an id is worse than one that honours all of them.

    Entries that are no ids of the model's vocabulary are left out with a warning.
    """
    sources: list[tuple[str, Any]] = [
        ("generation_config", source.generation_config.get("eos_token_id")),
        ("config", source.config.get("eos_token_id")),
        ("config", list(spec.eos_token_ids)),
        ("tokenizer", tokenizer.eos_token_id),
    ]
    found: dict[int, None] = {}
    bad: dict[tuple[str, str], None] = {}
    for where, value in sources:
        for token_id in _entries(value):
            if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < spec.vocab_size:
                found[token_id] = None
            else:
                bad[where, repr(token_id)] = None
    for where, text in bad:
        log.warning(
            "eos_token_id %s of the model's %s is not in the vocabulary of %d ids and is ignored", text, where, spec.vocab_size
        )
    return tuple(found)


def _entries(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)
