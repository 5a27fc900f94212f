"""Sampler: from logits to tokens, for a whole batch at once."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pegboard.wire import Logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch

    from pegboard.contracts.logits_processor import LogitsProcessor

API: Final = 1


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The distinct tokens that a request knows: ``ids`` [U] int64, and [U] int32 how often each occurs in its output (0: in
    the prompt only). Kept up to date by the worker, token by token."""

    ids: np.ndarray
    output_counts: np.ndarray


@dataclass(slots=True)
class SamplingBatch:
    """The rows that sample in this step, as columns of length N (numpy, resident; views are valid for this step only).

    The known tokens of row ``i``, prompt and output, are ``token_ids[slots[i], :num_tokens[i]]``, of which the first
    ``prompt_lens[i]`` are prompt. ``positions`` counts output tokens so far: a row's draw is a function of (``seeds``,
    ``positions``) and the token id. ``stop_token_ids`` and ``min_tokens``: ids that may not be chosen before ``min_tokens``
    output tokens. Dicts are sparse, from row in this batch to what it asks for.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    repetition_penalty: np.ndarray
    presence_penalty: np.ndarray
    frequency_penalty: np.ndarray
    seeds: np.ndarray
    """[N] uint64: the request's seed, or a random one drawn when it entered."""
    positions: np.ndarray
    num_logprobs: np.ndarray
    """[N] int32, -1 for none."""
    min_tokens: np.ndarray
    stop_token_ids: list[list[int]]
    slots: np.ndarray
    """[N] int64: the resident row of each, in ``token_ids`` and for logits processors."""
    token_ids: np.ndarray
    """[num_slots, longest] int32, resident."""
    num_tokens: np.ndarray
    prompt_lens: np.ndarray
    vocab_limit: int
    """Ids from here on (rows that only pad the embedding) are never chosen or listed."""
    token_counts: dict[int, TokenCounts] = field(default_factory=dict)
    """Rows with a penalty: what it looks at."""
    logit_bias: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """ids [K] int64 and what is added to their logits [K] float32."""
    allowed_token_ids: dict[int, np.ndarray] = field(default_factory=dict)
    """[K] int64: no other id may be chosen."""
    bad_words: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Token sequences whose last token may not be chosen where the row's output ends with those before it."""
    grammar_masks: dict[int, np.ndarray] = field(default_factory=dict)
    """[ceil(vocab / 32)] little-endian uint32: bit ``i`` is set where id ``i`` may be chosen."""
    processors: Sequence[LogitsProcessor] = ()
    """In order; their state is up to date."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class SamplerOutput:
    """``token_ids`` [N] int64 on the host. ``logprobs`` and ``errors`` are sparse, by row."""

    token_ids: np.ndarray
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler(abc.ABC):
    """Constructed with ``config``. Holds no per-request state.

    The order of operations, which every sampler keeps:

    1. raw log probabilities are noted;
    2. logit bias is added;
    3. logits processors that may change the highest logit, in order;
    4. penalties: repetition on prompt and output, presence and frequency on the output;
    5. what must not be chosen is forbidden, so that nothing can undo it: ids outside ``allowed_token_ids`` and the grammar's
       mask, the last token of a bad word, stop ids before ``min_tokens``;
    6. greedy rows take the first of the highest logits; the others are divided by their temperature;
    7. logits processors that are argmax invariant, on the rows that are not greedy;
    8. min-p, then top-k, then top-p on what those left;
    9. a draw.

    Invariants: a row's token depends on its own logits and columns only, not on its batch mates or their order; greedy rows
    take the first of equal maxima; a row whose logits hold a NaN is reported in ``errors`` and harms no other row.
    """

    @abc.abstractmethod
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        """``logits`` [N, vocab_size] may be overwritten."""
