"""Run the ranks of one model by hand, each rank on a thread of its own, without workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from pegboard.contracts.attention import AttentionBackend, CommonAttentionMetadata
from pegboard.contracts.communicator import Communicator
from pegboard.contracts.model import Model
from pegboard.plugins.parallel import stage_layers
from pegboard.testing.model_session import ModelSession
from pegboard.testing.thread_communicator import ThreadCommunicator
from pegboard.wire import World

MakeRank = Callable[[World, Communicator | None, range], Model]
_numbers = itertools.count()


@contextmanager
def communicators(size: int) -> Iterator[list[ThreadCommunicator]]:
    """Those of a group of threads, closed at the end."""
    make = partial(ThreadCommunicator, world_size=size, group=f"group{next(_numbers)}")
    with ExitStack() as stack:
        made = on_threads([partial(make, rank=rank) for rank in range(size)])
        for communicator in made:
            stack.callback(communicator.close)
        yield made


def on_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return, all run at once, without gradients. Raises what the first one raised."""

    def run(function: Callable[[], Any]) -> Any:
        torch.set_num_threads(1)
        with torch.no_grad():
            return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(run, function) for function in functions]]


@contextmanager
def made_ranks(make: MakeRank, tp: int, pp: int, num_layers: int, weights: Mapping[str, Any]) -> Iterator[list[Model]]:
    """The loaded models of all ranks, in their order."""
    models: list[Model] = []
    with ExitStack() as stack:
        for stage, layers in enumerate(stage_layers(num_layers, pp)):
            group: Sequence[Communicator | None] = stack.enter_context(communicators(tp)) if tp > 1 else [None]
            for place, communicator in enumerate(group):
                models.append(make(World(rank=stage * tp + place, tp_size=tp, pp_size=pp), communicator, layers))
        on_threads([partial(model.load_weights, weights) for model in models])
        yield models


class RanksSession(ModelSession):
    """As ``ModelSession``, for all ranks of a model together. Raises ``AssertionError`` where ranks that share layers differ."""

    def __init__(
        self, models: Sequence[Model], tp: int, *, backend: AttentionBackend | None = None, num_blocks: int = 128
    ) -> None:
        super().__init__(models[-1], backend=backend, num_blocks=num_blocks)
        self.stages = [models[start : start + tp] for start in range(0, len(models), tp)]
        self.all_caches = [[self._make_caches(model, num_blocks) for model in stage] for stage in self.stages]

    def _logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, common: CommonAttentionMetadata, prompt_lens: torch.Tensor
    ) -> torch.Tensor:
        def forward(model: Model, caches: dict[str, torch.Tensor], before: Any) -> Any:
            return model.forward(tokens, positions, self._context(common, caches, prompt_lens), before)

        passed: list[Any] = [None] * len(self.stages[0])
        for stage, all_caches in zip(self.stages, self.all_caches, strict=True):
            passed = on_threads([partial(forward, *each) for each in zip(stage, all_caches, passed, strict=True)])
            _agree(passed)
        last = zip(self.stages[-1], passed, strict=True)
        logits = on_threads([partial(model.compute_logits, hidden) for model, hidden in last])
        _agree(logits)
        return logits[0]  # type: ignore[no-any-return]


def _agree(results: Sequence[Any]) -> None:
    """Bit by bit."""
    for result in results[1:]:
        if isinstance(result, Mapping):
            assert result.keys() == results[0].keys()
            assert all(torch.equal(tensor, results[0][name]) for name, tensor in result.items()), "ranks of a stage differ"
        else:
            assert torch.equal(result, results[0]), "ranks of a stage differ"
