"""ScriptedModel: a model for the real worker whose next token is a function of all tokens before it.

It has no weights, and its KV cache holds token ids: each next token is computed from what the cache gives back through the
block table, so a wrong block, a lost copy or a neighbour's token shows in the output. Use it as a plugin::

    from pegboard.testing.scripted_model import ScriptedPlugin, text_model

    llm = pegboard.LLM("scripted", plugins={"scripted": ScriptedPlugin(text_model({"Hi": " there"}))})

torch is imported when the model is made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pegboard.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionQuery,
    CommonAttentionMetadata,
    Support,
)
from pegboard.contracts.kv_allocator import NULL_BLOCK
from pegboard.contracts.model import ForwardContext, Model, ModelSpec
from pegboard.contracts.model_source import ModelSource
from pegboard.contracts.tokenizer import Tokenizer
from pegboard.contracts.weight_loader import WeightHandle, WeightLoader
from pegboard.plugins import (
    AttentionBackendProvider,
    ModelProvider,
    TokenizerProvider,
    WeightLoaderProvider,
    hookimpl,
)
from pegboard.testing.fakes import NextToken, hash_model, scripted_model
from pegboard.testing.windows import first_token
from pegboard.wire import World

if TYPE_CHECKING:
    import torch

NAN = -1
"""Returned instead of a token: the row's logits are not a number."""
EOS = 256
_HEAD_SIZE = 8
_NAME = "scripted"
_BASE = 256
_DIGITS = 3
"""Ids are stored as digits to the base 256, which every floating type holds exactly."""


def text_model(answers: Mapping[str, str]) -> NextToken:
    """Answers each prompt (in bytes, see ``ByteTokenizer``) with its text and then end-of-sequence."""
    return scripted_model({tuple(p.encode()): [*a.encode(), EOS] for p, a in answers.items()}, then=EOS)


class ScriptedModel(Model):
    """``delay``: seconds that every forward takes at least.

    Every layer stores the tokens, and the last one's are asked. Ranks of one stage all do the same. A stage hands on the ids of
    its tokens, and the next one refuses those of another step.
    ``windows``: of the layers, in turn; the last one has none. What others have within their windows must be what it has.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        next_token: NextToken,
        delay: float = 0.0,
        windows: Sequence[int | None] = (None,),
        world: World | None = None,
        layers: range | None = None,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.next_token, self.delay = next_token, delay
        self._is_last = world is None or world.is_last_stage
        self._layers = tuple(
            AttentionLayer(
                f"{_NAME}.{i}" if i else _NAME,
                num_heads=1,
                num_kv_heads=1,
                head_size=_HEAD_SIZE,
                scale=1.0,
                sliding_window=windows[i % len(windows)],
            )
            for i in layers or range(spec.num_layers)
        )
        self._histories: list[list[int]] = []

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        return self._layers

    def load_weights(self, weights: Mapping[str, WeightHandle]) -> None:
        """There are none."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        intermediate: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """The hidden state of a token names its row, in order, and how many tokens of it end there."""
        import numpy as np

        time.sleep(self.delay)
        hidden = input_ids.new_zeros(len(input_ids), _HEAD_SIZE).to(self.dtype)
        handed_on = hidden.clone()
        handed_on[:, :_DIGITS] = _digits(input_ids).to(self.dtype)
        self._histories = []
        if context.kv_caches is None:
            return hidden if self._is_last else {"hidden": handed_on}
        for layer in self._layers:
            cache, step = context.kv_caches[layer.name], _step(context, layer)
            cache.view(-1, _HEAD_SIZE)[step.slot_mapping, :_DIGITS] = _digits(input_ids).to(cache.dtype)
        if intermediate is not None and intermediate["hidden"].any() and not intermediate["hidden"].equal(handed_on):
            raise AssertionError(f"the stage before computed other tokens than {input_ids.tolist()}")
        if not self._is_last:
            return {"hidden": handed_on}
        for table, length in zip(step.block_table, step.seq_lens.tolist(), strict=True):
            blocks = table[: -(-length // step.block_size)]
            kept = _numbers(cache[blocks].view(-1, _HEAD_SIZE)[:length]) if int(blocks[0]) != NULL_BLOCK else []
            self._histories.append(kept)
        for layer in self._layers:
            self._check_window(layer, context.kv_caches[layer.name], _step(context, layer))
        rows = np.repeat(np.arange(step.num_rows), np.diff(step.query_start_loc))
        hidden[:, :_DIGITS] = _digits(positions.new_tensor(rows)).to(self.dtype)
        hidden[:, _DIGITS : 2 * _DIGITS] = _digits(positions + 1).to(self.dtype)
        return hidden

    def _check_window(self, layer: AttentionLayer, cache: torch.Tensor, step: CommonAttentionMetadata) -> None:
        """What the new tokens of each row see in ``layer`` is what the last layer has."""
        if layer.sliding_window is None:
            return
        for row, history in enumerate(self._histories):
            begin, end = step.query_start_loc[row : row + 2].tolist()
            length = int(step.seq_lens[row])
            seen = first_token(length - (end - begin), layer.sliding_window)
            first = seen // step.block_size
            blocks = step.block_table[row, first : -(-length // step.block_size)]
            kept = _numbers(cache[blocks].view(-1, _HEAD_SIZE)[seen - first * step.block_size : length - first * step.block_size])
            if history and kept != history[seen:]:
                raise AssertionError(f"layer {layer.name} has tokens {kept} in its window, not {history[seen:]}")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """10 for the next token, 0 for all others. Where a prompt that has no script yet goes on, all are 0."""
        logits = hidden.new_zeros(len(hidden), self.spec.vocab_size)
        for i, (row, count) in enumerate(zip(_numbers(hidden), _numbers(hidden[:, _DIGITS:]), strict=True)):
            history = self._histories[row] if self._histories else []
            if not history:  # a row in the null block is a warm-up's
                continue
            with contextlib.suppress(*([KeyError] if count < len(history) else ())):
                token = self.next_token(history[:count])
                logits[i, token if token != NAN else 0] = 10.0 if token != NAN else float("nan")
        return logits


def _step(context: ForwardContext, layer: AttentionLayer) -> CommonAttentionMetadata:
    """As ``ScriptedAttention`` hands it through."""
    metadata: CommonAttentionMetadata = context.attention[layer.name].metadata
    return metadata


def _digits(ids: torch.Tensor) -> torch.Tensor:
    """[N] to [N, 3]."""
    import torch

    return torch.stack([ids // _BASE**place % _BASE for place in range(_DIGITS)], dim=1)


def _numbers(stored: torch.Tensor) -> list[int]:
    """Back from [N, head_size]."""
    import torch

    places = torch.tensor([_BASE**place for place in range(_DIGITS)], device=stored.device)
    return (stored[:, :_DIGITS].to(torch.int64) * places).sum(dim=1).tolist()


class ScriptedAttention(AttentionBackend):
    """Hands the step through to the model; attends to nothing."""

    name: ClassVar[str] = _NAME

    def __init__(self, query: AttentionQuery) -> None:
        self.query = query

    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        own = (query.num_heads, query.num_kv_heads, query.head_size) == (1, 1, _HEAD_SIZE)
        return Support.of(None if own else "it serves the scripted model only")

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    def build_metadata(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return out.zero_()


class NoWeights(WeightLoader):
    @contextlib.contextmanager
    def open(self, source: ModelSource, spec: Any) -> Iterator[Mapping[str, WeightHandle]]:
        yield {}


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8, and end-of-sequence. A chat is the messages' contents, one per line."""

    @property
    def vocab_size(self) -> int:
        return EOS + 1

    @property
    def eos_token_id(self) -> int:
        return EOS

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts = [bytes([i]) if 0 <= i < EOS else b"<eos>" if i == EOS and not skip_special_tokens else b"" for i in token_ids]
        return b"".join(parts).decode(errors="replace")

    def token_text(self, token_id: int) -> str | None:
        return chr(token_id) if 0 <= token_id < EOS else "<eos>" if token_id == EOS else None

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if 0 <= token_id < EOS else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        return self.encode("".join(f"{message['content']}\n" for message in messages))


def spec_of(source: ModelSource) -> ModelSpec:
    return ModelSpec(
        architecture="ScriptedForCausalLM",
        vocab_size=source.config["vocab_size"],
        hidden_size=_HEAD_SIZE,
        num_layers=source.config["num_hidden_layers"],
        num_heads=1,
        num_kv_heads=1,
        head_size=_HEAD_SIZE,
        max_model_len=source.config["max_position_embeddings"],
        dtype="float32",
        eos_token_ids=(EOS,),
    )


def any_number(spec: ModelSpec, ranks: int) -> list[str]:
    """Ranks share nothing."""
    return []


class ScriptedPlugin:
    """Offers the model reference ``scripted`` and all the parts that it needs. ``num_layers``: for as many pipeline stages;
    ``windows``: see ``ScriptedModel``."""

    def __init__(
        self,
        next_token: NextToken | None = None,
        *,
        vocab_size: int = EOS + 1,
        max_model_len: int = 4096,
        delay: float = 0.0,
        num_layers: int = 1,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._model = partial(ScriptedModel, next_token=next_token or hash_model(vocab_size), delay=delay, windows=windows)
        self._config = {"vocab_size": vocab_size, "max_position_embeddings": max_model_len, "num_hidden_layers": num_layers}

    @hookimpl
    def resolve_model(self, ref: str, config: Any) -> ModelSource | None:
        if ref != _NAME:
            return None
        architecture = {"architectures": ["ScriptedForCausalLM"]}
        return ModelSource(ref, path=_NAME, loader=_NAME, tokenizer=_NAME, config={**architecture, **self._config})

    @hookimpl
    def models(self) -> Iterable[ModelProvider]:
        yield ModelProvider(
            name=_NAME,
            target=self._model,
            architectures=("ScriptedForCausalLM",),
            spec=f"{__name__}:spec_of",
            parallel=f"{__name__}:any_number",
            capabilities=frozenset({"tp", "pp"}),
        )

    @hookimpl
    def attention_backends(self) -> Iterable[AttentionBackendProvider]:
        yield AttentionBackendProvider(name=_NAME, target=ScriptedAttention, priority=100)

    @hookimpl
    def weight_loaders(self) -> Iterable[WeightLoaderProvider]:
        yield WeightLoaderProvider(name=_NAME, target=NoWeights)

    @hookimpl
    def tokenizers(self) -> Iterable[TokenizerProvider]:
        yield TokenizerProvider(name=_NAME, target=ByteTokenizer)
