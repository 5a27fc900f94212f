"""Steps on made-up requests: to measure memory before there is a KV cache, and to warm up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pegboard.contracts.attention import CommonAttentionMetadata
from pegboard.contracts.model import ForwardContext, Model
from pegboard.contracts.sampler import Sampler, SamplingBatch
from pegboard_plugins.sampling.logprobs import logprobs_of
from pegboard_plugins.worker.attention_groups import LayerGroup, groups_in_step
from pegboard_plugins.worker.links import Intermediate, Stage
from pegboard_plugins.worker.prompt_logprobs import POSITIONS_AT_ONCE, raw_logits


def spread(num_tokens: int, num_rows: int, longest: int) -> np.ndarray:
    """``num_tokens`` over ``num_rows`` requests, the remainder to the first; none gets more than ``longest``. [rows] int32."""
    num_rows = min(num_rows, num_tokens)
    lengths = np.full(num_rows, num_tokens // num_rows, np.int32)
    lengths[0] += num_tokens % num_rows
    return np.minimum(lengths, longest)


def scratch_caches(
    model: Model,
    groups: Sequence[LayerGroup],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_blocks: int = 1,
) -> dict[str, torch.Tensor]:
    """A cache of ``num_blocks``, the same memory for all layers alike: each stores before it reads. Attention then works as in a
    real step."""
    shared: dict[tuple[int, ...], torch.Tensor] = {}
    caches = {}
    backends = {name: group.backend for group in groups for name in group.layers}
    for layer in model.attention_layers:
        shape = backends[layer.name].kv_cache_shape(num_blocks, block_size, layer.num_kv_heads, layer.head_size)
        if shape not in shared:
            shared[shape] = torch.zeros(shape, dtype=dtype, device=device)
        caches[layer.name] = shared[shape]
    return caches


def run_forward(
    model: Model,
    groups: Sequence[LayerGroup],
    caches: Mapping[str, torch.Tensor],
    lengths: np.ndarray,
    block_size: int,
    device: torch.device,
    stage: Stage,
    *,
    block_table: np.ndarray | None = None,
    token_ids: np.ndarray | None = None,
) -> tuple[torch.Tensor | Intermediate, torch.Tensor | None]:
    """Forward of one prompt per entry of ``lengths``: of token 0, all in the null block, unless ``token_ids`` [T] and
    ``block_table`` [B, blocks] int32 tell others. Returns hidden states [T, hidden_size], and logits
    [B, vocab_size] of each one's last token; on stages but the last what would go on to the next one, and None. Nothing passes
    between stages."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    total = int(starts[-1])
    positions = np.arange(total) - np.repeat(starts[:-1], lengths)
    if block_table is None:
        block_table = np.zeros((len(lengths), -(-int(lengths.max()) // block_size)), np.int32)
    blocks = block_table[np.repeat(np.arange(len(lengths)), lengths), positions // block_size].astype(np.int64)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=torch.from_numpy(block_table).to(device),
        slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size).to(device),
        block_size=block_size,
        num_rows=len(lengths),
        num_tokens=total,
    )
    prompt_lens = torch.from_numpy(np.repeat(lengths, lengths).astype(np.int64)).to(device)
    context = ForwardContext(groups_in_step(groups, [common] * len(groups)), caches, prompt_lens)
    with torch.inference_mode(False):  # like a real step's: code compiled for one kind of tensor is not for the other
        ids = torch.zeros(total, dtype=torch.int64) if token_ids is None else torch.from_numpy(token_ids)
        input_ids, at = ids.to(device), torch.from_numpy(positions).to(device)
    hidden = model.forward(input_ids, at, context, stage.blank(total))
    if not stage.is_last:
        return hidden, None
    assert isinstance(hidden, torch.Tensor), "the last stage returns hidden states"
    return hidden, model.compute_logits(hidden[torch.from_numpy(starts[1:] - 1).to(device)])


def copy_for_forks(logits: torch.Tensor) -> None:
    """The most that forked rows need: with one fork among all rows, the logits of the others lie next to those that all rows
    sample from."""
    logits[1:].clone()


def run_prompt_logprobs(model: Model, hidden: torch.Tensor, vocab_limit: int) -> None:
    """Of as many positions as are looked at in one portion."""
    raw = raw_logits(model, hidden[:POSITIONS_AT_ONCE], vocab_limit)
    logprobs_of(torch.nan_to_num_(raw), np.zeros(len(raw), np.int64), [1] * len(raw))


def run_sampler(sampler: Sampler, logits: torch.Tensor, vocab_limit: int) -> None:
    """Sample every row in the way that takes most memory: temperature and top-p."""
    n = len(logits)
    ones, zeros = np.ones(n, np.float32), np.zeros(n, np.float32)
    batch = SamplingBatch(
        temperature=ones,
        top_k=np.zeros(n, np.int32),
        top_p=np.full(n, 0.9, np.float32),
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seeds=np.zeros(n, np.uint64),
        positions=np.zeros(n, np.int32),
        num_logprobs=np.full(n, -1, np.int32),
        min_tokens=np.zeros(n, np.int32),
        stop_token_ids=[[] for _ in range(n)],
        slots=np.arange(n),
        token_ids=np.zeros((n, 1), np.int32),
        num_tokens=np.ones(n, np.int32),
        prompt_lens=np.ones(n, np.int32),
        vocab_limit=vocab_limit,
    )
    sampler.sample(logits, batch)
