"""Sampler: from logits to tokens, for a whole batch at once."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pegboard.wire import Logprobs

if TYPE_CHECKING:
    import numpy as np
    import torch

API: Final = 1


@dataclass(slots=True)
class SamplingBatch:
    """The rows that sample in this step, as columns of length N (numpy, resident; views are valid for this step only).

    ``token_ids`` [N, longest] int32 with ``num_tokens`` valid per row, ``prompt_lens`` of which are prompt: what the penalties
    look at; [0, …] in a step in which no row has penalties. ``positions`` counts output tokens so far: a row's draw is a
    function of (``seeds``, ``positions``) and the token id. ``stop_token_ids`` and ``min_tokens``: ids that may not be chosen
    before ``min_tokens`` output tokens.
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
    token_ids: np.ndarray
    num_tokens: np.ndarray
    prompt_lens: np.ndarray
    vocab_limit: int
    """Ids from here on (rows that only pad the embedding) are never chosen or listed."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class SamplerOutput:
    """``token_ids`` [N] int64 on the host. ``logprobs`` and ``errors`` are sparse, by row."""

    token_ids: np.ndarray
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler(abc.ABC):
    """Constructed with ``config``. Holds no per-request state.

    Invariants: a row's token depends on its own logits and columns only, not on its batch mates or their order; greedy rows
    take the first of equal maxima; a row whose logits hold a NaN is reported in ``errors`` and harms no other row.
    """

    @abc.abstractmethod
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        """``logits`` [N, vocab_size] may be overwritten."""
