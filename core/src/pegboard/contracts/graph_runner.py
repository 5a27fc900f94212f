"""GraphRunner: replays captured forwards instead of launching a model's operations one by one."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from pegboard.contracts.attention import AttentionBackend, CommonAttentionMetadata
    from pegboard.contracts.communicator import Communicator
    from pegboard.contracts.model import Model
    from pegboard.contracts.worker import WorkerExtension

API: Final = 1


@dataclass(slots=True)
class ForwardInputs:
    """What one step's forward is computed from. T tokens of B rows."""

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    attention: Sequence[CommonAttentionMetadata]
    """The step as each attention group sees it, in the order of ``GraphTarget.backends``. They differ in their blocks only."""
    prompt_lens: torch.Tensor | None = None
    """[T] int64, for models that need it."""
    intermediate: Mapping[str, torch.Tensor] | None = None
    """What the pipeline stage before has computed: [T, width] each."""


@dataclass(frozen=True, slots=True)
class GraphTarget:
    """What is captured, and what has a say in whether it can be. Made by the worker when weights and KV cache are in place."""

    forward: Callable[[ForwardInputs, Sequence[Any]], torch.Tensor | Mapping[str, torch.Tensor]]
    """The model's forward on metadata of each group: made by ``build_metadata``, or by ``graph_metadata`` and ``refill``."""
    model: Model
    backends: Sequence[AttentionBackend]
    """One per attention group."""
    device: torch.device
    dtype: torch.dtype
    max_rows: int
    """The most rows with one token each that a step may have."""
    max_blocks: Sequence[int]
    """The most blocks that a row may have in each attention group."""
    prompt_lens: bool = False
    """Whether the model needs them."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Of the tensors that come from the pipeline stage before; empty on the first."""
    communicator: Communicator | None = None
    """Among the ranks that share this stage's layers."""
    extensions: Mapping[str, WorkerExtension] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What was captured, or why nothing was."""

    sizes: tuple[int, ...] = ()
    """Rows of each graph."""
    seconds: float = 0.0
    num_bytes: int = 0
    """That the graphs hold, buffers included."""
    off: tuple[str, ...] = ()
    """Why there are no graphs: every reason. Empty where there are some."""


class GraphRunner(abc.ABC):
    """One per worker. Constructed with those that it takes, by name, of ``config``, ``composition``, ``spec``, ``options`` and
    ``platform``.

    Invariants: ``run`` gives what ``GraphTarget.forward`` would give, up to the order of sums, and never changes what it is
    given. Without a captured graph nothing fits. What ``run`` returns is overwritten by its next call. All ranks of a stage
    capture and run alike, because their steps have equal sizes. Logits are not part of a graph: how many rows need them changes
    from step to step.
    """

    @property
    @abc.abstractmethod
    def report(self) -> GraphReport:
        """Of the last ``capture``, or why there was none."""

    @abc.abstractmethod
    def measure(self, target: GraphTarget) -> int:
        """Bytes that ``capture`` will take, for the size of the KV cache. Called before there is one, with caches of one block;
        nothing is kept. 0 where nothing will be captured."""

    @abc.abstractmethod
    def capture(self, target: GraphTarget) -> GraphReport:
        """Capture what is worth it; what was captured before is gone. Where nothing can be, say why. Raises ``RuntimeError``,
        with the remedy, where something that should be capturable is not."""

    @abc.abstractmethod
    def fits(self, attention: Sequence[CommonAttentionMetadata]) -> bool:
        """Whether ``run`` takes this step. Changes nothing, and waits for nothing."""

    @abc.abstractmethod
    def run(self, inputs: ForwardInputs) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """The result of ``forward`` for the T tokens of a step that fits."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Give graphs and their memory back, before weights or KV cache go away or ``GraphTarget.communicator`` is closed, which
        graphs with its operations keep from closing. Idempotent."""
