"""``attention.backend = "prefill,decode"``: two backends that share one cache, and why two cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pegboard.config import ConfigError
from pegboard.contracts.attention import AttentionBackend, AttentionQuery, CommonAttentionMetadata, Support
from pegboard.plugins import AttentionBackendProvider, CompositionError, PluginError, select_attention
from pegboard.plugins.attention import backend_names
from pegboard.testing.attention_session import AttentionSession
from pegboard.testing.plugins import compose_with
from pegboard.testing.reference_attention import ReferenceAttentionBackend

pytestmark = pytest.mark.usefixtures("standard")

QUERY = AttentionQuery("cpu", "float32", "float32", 4, 2, 8, 4)


class Noting(ReferenceAttentionBackend):
    """Remembers its steps and what it was made with."""

    def __init__(self, query: AttentionQuery, device: Any = None, options: Any = "not given") -> None:
        super().__init__(query, device)
        self.device, self.options = device, options
        self.steps: list[CommonAttentionMetadata] = []

    def build_metadata(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        self.steps.append(common)
        return super().build_metadata(common)


class Prompts(Noting):
    name = "prompts"


class Tokens(Noting):
    name = "tokens"


class Elsewhere(ReferenceAttentionBackend):
    """Says that it lays its cache out in another way, which has the same shape where block size and heads agree."""

    name = "elsewhere"
    kv_layout = "block kv head token dim"

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_size)


class Whole(AttentionBackend):
    """Stores and attends in one."""

    name = "whole"
    kv_layout = ReferenceAttentionBackend.kv_layout

    supports = classmethod(lambda cls, query: Support(True))
    kv_cache_shape = ReferenceAttentionBackend.kv_cache_shape

    def build_metadata(self, common: CommonAttentionMetadata) -> Any:
        return common

    def forward(self, layer, query, key, value, kv_cache, metadata, out):
        return out


class Picky(ReferenceAttentionBackend):
    name = "picky"

    supports = classmethod(lambda cls, query: Support.of("head size 8 is too small", "no"))


def composed(setting: str, **extra: Any) -> Any:
    backends = [Prompts, Tokens, Elsewhere, Whole, Picky]
    hooks = {"attention_backends": lambda: [AttentionBackendProvider(name=b.name, target=b) for b in backends]}
    return compose_with(hooks, attention={"backend": setting}, **extra)


def test_each_gets_its_rows_in_their_order() -> None:
    composition = composed("prompts, tokens")
    choice = select_attention(QUERY, composition)
    assert choice.provider.name == "prompts,tokens"
    assert choice.reasons == ("prompts for prefill, tokens for decode: named by attention.backend",)
    session = AttentionSession(lambda query: composition.make(choice.provider, query=query, device="cpu"), QUERY)
    pair = session.backend
    assert pair.name == "prompts,tokens"
    assert type(pair).kv_cache_shape(3, 4, 2, 8) == (3, 2, 4, 2, 8)
    assert type(pair).supports(QUERY).ok
    session.check([("a", 5), ("b", 1), ("pad", 0), ("c", 7)])
    session.check([("a", 1), ("d", 3), ("c", 1), ("e", 6), ("b", 1)], forks={"e": ("d", 0)})
    session.check([("d", 1), ("a", 1)])
    prompts, tokens = pair.prefill, pair.decode
    assert [np.diff(step.query_start_loc).tolist() for step in prompts.steps] == [[5, 7], [3, 6]]
    assert [step.seq_lens.tolist() for step in tokens.steps] == [[1], [6, 8, 2], [4, 7]]
    assert all(step.num_tokens == len(step.slot_mapping) for step in (*prompts.steps, *tokens.steps))
    assert (prompts.device, prompts.options) == ("cpu", None), "made like any part, with the options of its plugin"


def test_rows_that_lie_side_by_side_are_not_copied() -> None:
    composition = composed("prompts,tokens")
    provider = select_attention(QUERY, composition).provider
    session = AttentionSession(lambda query: composition.make(provider, query=query, device="cpu"), QUERY)
    session.check([("a", 5), ("b", 2)])
    step = session.prepare([("a", 1), ("b", 1), ("c", 9)])
    parts = session.backend.build_metadata(step.common)
    assert [part.tokens for part in parts] == [slice(2, 11), slice(0, 2)]
    assert parts[0].of(step.query).data_ptr() == step.query[2:].data_ptr()
    session.compare(session.run(step, metadata=parts), step.expected)


def test_one_name_twice_is_that_backend() -> None:
    assert select_attention(QUERY, composed("tokens,tokens")).backend is Tokens


@pytest.mark.parametrize(
    ("setting", "messages"),
    [
        ("prompts,elsewhere", ["differ in shape: prompts (2, 2, 4, 2, 8), elsewhere (2, 2, 2, 4, 8)", "laid out differently"]),
        ("whole,tokens", ["whole cannot store and attend apart"]),
    ],
)
def test_two_that_cannot_share_a_cache_are_refused_with_every_reason(setting: str, messages: list[str]) -> None:
    with pytest.raises(CompositionError) as caught:
        select_attention(QUERY, composed(setting))
    assert len(caught.value.problems) == len(messages)
    assert all(message in str(caught.value) for message in messages)


def test_equal_shapes_are_not_enough() -> None:
    square = AttentionQuery("cpu", "float32", "float32", 4, 4, 8, 4)
    with pytest.raises(
        CompositionError, match=r"laid out differently: prompts 'block kv token head dim', elsewhere 'block kv head"
    ):
        select_attention(square, composed("prompts,elsewhere"))


def test_both_must_support_the_query() -> None:
    with pytest.raises(CompositionError) as caught:
        select_attention(QUERY, composed("tokens,picky"))
    assert len(caught.value.problems) == 2
    assert "head size 8 is too small" in str(caught.value)


@pytest.mark.parametrize("setting", ["a,b,c", "tokens,", ",", "auto,tokens"])
def test_what_is_no_pair(setting: str) -> None:
    with pytest.raises(PluginError, match="is neither a backend's name nor two of them"):
        backend_names(setting)


def test_unknown_names_are_told_before_workers_start() -> None:
    with pytest.raises(PluginError, match=r"no attention is called 'tokenz'.*did you mean 'tokens'"):
        composed("prompts,tokenz")


def test_metadata_for_graphs_is_the_decode_backend_s() -> None:
    composition = composed("prompts,tokens")
    provider = select_attention(QUERY, composition).provider
    pair = composition.make(provider, query=QUERY, device="cpu")
    assert pair.graph_support == "never"
    with pytest.raises(TypeError, match=r"Tokens\.graph_support is 'never'"):
        pair.graph_metadata(2, 2)


def test_blocks_are_moved_as_the_decode_backend_does() -> None:
    class Mover(Tokens):
        name = "mover"
        moved = 0

        @classmethod
        def move_blocks(cls, source: Any, target: Any, pairs: Any) -> None:
            cls.moved += len(pairs)

    hooks = {"attention_backends": lambda: [AttentionBackendProvider(name=b.name, target=b) for b in (Prompts, Mover)]}
    composition = compose_with(hooks, attention={"backend": "prompts,mover"})
    cache = torch.zeros(3, 2, 4, 2, 8)
    select_attention(QUERY, composition).backend.move_blocks(cache, cache, torch.tensor([[0, 1]]))
    assert Mover.moved == 1


def test_the_error_of_a_name_is_one_of_the_configuration(tmp_path: Any) -> None:
    from pegboard import LLM

    with pytest.raises(ConfigError, match=r"attention\.backend: no attention is called 'tokenz'"):
        LLM("tiny", attention={"backend": "torch,tokenz"})
