"""Model: an architecture. Knows layers and weights; knows nothing of requests, slots or blocks."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pegboard.contracts.weight_loader import WeightHandle

if TYPE_CHECKING:
    import torch

    from pegboard.contracts.attention import AttentionBackend, AttentionLayer

API: Final = 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and facts of a checkpoint, read from its configuration without torch."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    """Context length that the checkpoint supports, rope scaling applied."""
    dtype: str | None = None
    """As stated by the checkpoint: "float32", "bfloat16", "float16", or None."""
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    prompt_length_rope: bool = False
    """Rotary frequencies depend on the length of the prompt (dynamic NTK and LongRoPE past the trained length). Such a model
    needs ``ForwardContext.prompt_lens``, and a cached block may only serve requests whose prompts have the same length."""
    layer_weights: int = 0
    """Weights by which one layer multiplies a token: pipeline stages are balanced with it. 0: not told."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's own configuration (Hugging Face key names)."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers that share a block table, in one step."""

    backend: AttentionBackend
    metadata: Any
    """The backend's own, from ``build_metadata``."""


@dataclass(slots=True)
class ForwardContext:
    """What layers need of the step. Passed explicitly; there is no global."""

    attention: Mapping[str, AttentionGroup]
    """By the name of the attention layer. Layers of one group have the same object."""
    kv_caches: Mapping[str, torch.Tensor] | None
    """By the name of the attention layer; None where attention runs without a cache, and looks at no group."""
    prompt_lens: torch.Tensor | None = None
    """[T] prompt tokens of each token's request, the whole prompt even if it comes in chunks and also when tokens generated
    earlier are computed again. Needed only by models with ``ModelSpec.prompt_length_rope``."""


class Model(abc.ABC):
    """Constructed with those, by name, that it takes of

    - ``spec``, ``dtype`` (torch dtype) and ``device``;
    - ``world``: the place of this rank. Those of one pipeline stage (``tp_rank`` of ``tp_size``) share its layers, stages
      (``pp_rank`` of ``pp_size``) share the model;
    - ``communicator``: among the ranks of this stage, None where there is one. Stages are joined by the worker;
    - ``layers``: the range of decoder layers that this stage holds (see ``pegboard.plugins.parallel.stage_layers``). The first
      stage also holds the embedding, the last one the final norm and the head;
    - ``compiled``: whether torch.compile will compile ``forward``. ``communicator`` has only its collectives then.

    Invariants: after ``load_weights`` every parameter of this rank has been set from the checkpoint exactly once, or loading
    raised; ``forward`` keeps no state between steps; rows do not influence each other. All ranks of a stage call ``forward`` and
    ``compute_logits`` together, with equal arguments, and get results that are equal bit by bit.
    """

    capturable: bool = False
    """Declares that ``forward`` does the same operations for all steps of one size, on the device alone: it looks at no value,
    waits for nothing, copies nothing from the host, and keeps rows apart whatever padding rows hold. Graphs and torch.compile
    need it."""

    @classmethod
    def checkpoint_tensors(cls, spec: ModelSpec) -> Mapping[str, tuple[int, ...]] | None:
        """Names and shapes of the tensors that ``load_weights`` needs, found without reading files: what dummy weights are
        made from. None: not told, so the model has no dummy weights."""
        return None

    @classmethod
    def intermediate_widths(cls, spec: ModelSpec) -> Mapping[str, int]:
        """The tensors that a pipeline stage hands to the next one: name to width. Each is [T, width] in the model's dtype."""
        return {"hidden": spec.hidden_size}

    @property
    @abc.abstractmethod
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Layers of this rank, in order, with the numbers of heads that this rank has."""

    @abc.abstractmethod
    def load_weights(self, weights: Mapping[str, WeightHandle]) -> None:
        """Read what this rank needs, and no more where the format allows. Raises ``WeightsError`` listing (up to 10) missing,
        unexpected and wrongly shaped names of the whole checkpoint, on every rank alike."""

    @abc.abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        intermediate: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """[T] ids and positions to [T, hidden_size], after the final norm. Every pipeline stage but the first one gets what the
        one before it has returned as ``intermediate``; every one but the last returns the tensors of ``intermediate_widths``."""

    @abc.abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] to [N, vocab_size]. Called on rows that sample, and on prompt positions whose log probabilities are
        wanted; on the last pipeline stage only."""
