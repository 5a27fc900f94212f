"""Models that several ranks share: part of ``ModelConformance``."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import pytest
import torch

from pegboard.contracts.communicator import Communicator
from pegboard.contracts.model import Model, ModelSpec
from pegboard.contracts.weight_loader import WeightsError
from pegboard.plugins.parallel import stage_layers
from pegboard.testing.memory_weights import memory_handles
from pegboard.testing.model_session import ModelSession
from pegboard.testing.ranks_session import RanksSession, made_ranks
from pegboard.wire import World


class SharedModels(abc.ABC):
    """``ranks``: numbers of ranks that share a layer, and of stages, that the model must serve."""

    ranks: Sequence[tuple[int, int]] = ()

    def make_rank(self, world: World, communicator: Communicator | None, layers: range) -> Model:
        """A new model for one of several ranks, in float32, without weights."""
        raise NotImplementedError("a class with `ranks` gives make_rank")

    @abc.abstractmethod
    def spec(self) -> ModelSpec: ...

    @abc.abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]: ...

    @abc.abstractmethod
    def session(self) -> ModelSession: ...

    @abc.abstractmethod
    def tokens(self, count: int, seed: int = 0) -> list[int]: ...

    @abc.abstractmethod
    def assert_close(self, got: torch.Tensor, wanted: torch.Tensor) -> None: ...

    def each(self) -> Iterator[tuple[int, int, list[Model]]]:
        if not self.ranks:
            pytest.skip("one rank only")
        for tp, pp in self.ranks:
            with made_ranks(self.make_rank, tp, pp, self.spec().num_layers, memory_handles(self.tensors())) as models:
                yield tp, pp, models

    def test_ranks_give_what_one_gives(self) -> None:
        prompts = {"a": self.tokens(9, seed=1), "b": self.tokens(1, seed=2), "c": self.tokens(14, seed=3)}
        more = {name: self.tokens(1, seed=4) for name in prompts}
        alone = self.session()
        wanted = [alone.step(prompts), alone.step(more)]
        for tp, _, models in self.each():
            session = RanksSession(models, tp)
            for rows, expected in zip((prompts, more), wanted, strict=True):
                for name, logits in session.step(rows).items():
                    self.assert_close(logits, expected[name])

    def test_every_stage_has_its_layers(self) -> None:
        alone = [layer.name for layer in self.session().model.attention_layers]
        for tp, pp, models in self.each():
            held = [[layer.name for layer in model.attention_layers] for model in models]
            assert all(held[rank] == held[rank - rank % tp] for rank in range(tp * pp)), "ranks of a stage hold the same layers"
            assert [name for rank in range(0, tp * pp, tp) for name in held[rank]] == alone
            sizes = [len(layers) for layers in stage_layers(len(alone), pp)]
            assert [len(held[rank]) for rank in range(0, tp * pp, tp)] == sizes

    def test_ranks_run_without_caches(self) -> None:
        spec = self.spec()
        for tp, _, models in self.each():
            session = RanksSession(models, tp)
            session.all_caches = [[None] * tp for _ in session.stages]  # type: ignore[list-item]
            logits = session.step({"a": self.tokens(5)})["a"]
            assert logits.shape == (5, spec.vocab_size)
            assert bool(torch.isfinite(logits).all())

    def test_any_rank_tells_what_the_checkpoint_lacks(self) -> None:
        if not self.ranks:
            pytest.skip("one rank only")
        tp, pp = self.ranks[-1]
        names = list(self.tensors())
        for name in (names[0], names[len(names) // 2], names[-1]):
            tensors = self.tensors()
            del tensors[name]
            with (
                pytest.raises(WeightsError, match=name.replace(".", r"\.")),
                made_ranks(self.make_rank, tp, pp, self.spec().num_layers, memory_handles(tensors)),
            ):
                pass
