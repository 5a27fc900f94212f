"""The attention yardstick against torch's own dense attention."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pegboard.contracts.attention import AttentionLayer, CommonAttentionMetadata  # noqa: E402
from pegboard.testing.reference_attention import ReferenceAttentionBackend, attend  # noqa: E402


def mask_of(queries, keys, window):
    position = torch.arange(keys)[None]
    row = torch.arange(keys - queries, keys)[:, None]
    allowed = position <= row
    return allowed if window is None else allowed & (position > row - window)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_it_equals_dense_attention(window, queries):
    layer = AttentionLayer("a", num_heads=4, num_kv_heads=2, head_size=8, scale=0.3, sliding_window=window)
    q, k, v = torch.randn(queries, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1).repeat_interleave(2, 0),
        v.transpose(0, 1).repeat_interleave(2, 0),
        attn_mask=mask_of(queries, 9, window),
        scale=0.3,
    ).transpose(0, 1)
    assert torch.allclose(attend(layer, q, k, v), wanted, atol=1e-5)


def test_the_soft_cap_bounds_scores():
    layer = AttentionLayer("a", num_heads=1, num_kv_heads=1, head_size=2, scale=1.0, logits_soft_cap=2.0)
    q, k = torch.tensor([[[100.0, 0.0]]]), torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]])
    weights = torch.softmax(torch.tensor([2.0, -2.0]), 0)
    assert torch.allclose(attend(layer, q, k, k)[0, 0, 0], weights[0] - weights[1])


def test_it_writes_the_slots_and_reads_through_the_block_table():
    layer = AttentionLayer("a", num_heads=2, num_kv_heads=1, head_size=4, scale=0.5)
    backend = ReferenceAttentionBackend()
    cache = torch.zeros(backend.kv_cache_shape(6, 2, 1, 4))
    q, k, v = torch.randn(4, 2, 4), torch.randn(4, 1, 4), torch.randn(4, 1, 4)
    blocks = [5, 2]
    common = CommonAttentionMetadata(
        query_start_loc=np.array([0, 0, 4], np.int32),  # the first row is padding
        seq_lens=np.array([0, 4], np.int32),
        block_table=torch.tensor([[0, 0], blocks], dtype=torch.int32),
        slot_mapping=torch.tensor([10, 11, 4, 5]),
        block_size=2,
        num_rows=2,
        num_tokens=4,
    )
    out = backend.forward(layer, q, k, v, cache, backend.build_metadata(common), torch.empty_like(q))
    assert torch.equal(cache[5, 0], k[:2])
    assert torch.equal(cache[2, 1], v[2:])
    assert int(cache.ne(0).any(-1).sum()) == 8
    assert torch.allclose(out, attend(layer, q, k, v))
