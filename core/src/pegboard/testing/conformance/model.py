"""Conformance of a Model. Subclass, give ``spec``, ``make`` and ``tensors``, and every invariant of the contract is tested."""

from __future__ import annotations

import abc

import pytest
import torch

from pegboard.contracts.attention import AttentionBackend
from pegboard.contracts.model import ForwardContext, Model, ModelSpec
from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.conformance._model_ranks import SharedModels
from pegboard.testing.memory_weights import memory_handles
from pegboard.testing.model_session import ModelSession


class ModelConformance(SharedModels):
    """Models are tested in float32 on the processor, with a small checkpoint: at most a few layers and hidden sizes below 100.

    Those that several ranks can share also set ``ranks`` and give ``make_rank``.
    """

    tolerance = 1e-4
    """Largest difference of logits between two ways of computing the same."""

    @abc.abstractmethod
    def spec(self) -> ModelSpec:
        """Of the checkpoint that ``tensors`` gives."""

    @abc.abstractmethod
    def make(self) -> Model:
        """A new model for ``spec``, in float32, without weights."""

    @abc.abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint by name, none superfluous."""

    def loaded(self) -> Model:
        model = self.make()
        model.load_weights(memory_handles(self.tensors()))
        return model

    def session(self, model: Model | None = None, backend: AttentionBackend | None = None) -> ModelSession:
        return ModelSession(model or self.loaded(), backend=backend)

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(t) for t in torch.randint(0, self.spec().vocab_size, (count,), generator=generator)]

    def assert_close(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert got.shape == wanted.shape
        assert float((got - wanted).abs().max()) < self.tolerance

    # layers and shapes ----------------------------------------------------------------------------------------------

    def test_attention_layers_fit_the_spec(self) -> None:
        spec, layers = self.spec(), self.make().attention_layers
        assert len(layers) == spec.num_layers
        assert len({layer.name for layer in layers}) == len(layers)
        for layer in layers:
            assert (layer.num_heads, layer.num_kv_heads, layer.head_size) == (
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_size,
            )

    def test_told_tensors_are_those_of_the_checkpoint(self) -> None:
        told = self.make().checkpoint_tensors(self.spec())
        if told is not None:
            assert dict(told) == {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}

    def test_logits_of_any_number_of_rows(self) -> None:
        model, spec = self.loaded(), self.spec()
        for rows in (0, 1, 3):
            assert model.compute_logits(torch.randn(rows, spec.hidden_size)).shape == (rows, spec.vocab_size)

    def test_runs_without_caches_in_the_memory_phase(self) -> None:
        model, spec = self.loaded(), self.spec()
        hidden = model.forward(torch.tensor(self.tokens(5)), torch.arange(5), ForwardContext({}, None))
        assert isinstance(hidden, torch.Tensor)
        assert hidden.shape == (5, spec.hidden_size)
        assert bool(torch.isfinite(hidden).all())

    # rows and steps -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("chunks", [(1, 18), (7, 1, 1, 10), (18, 1)])
    def test_a_prompt_in_chunks_gives_the_same(self, chunks: tuple[int, ...]) -> None:
        model, tokens = self.loaded(), self.tokens(19)
        wanted = self.session(model).step({"a": tokens})["a"]
        session, got = self.session(model), []
        for size in chunks:
            start = session.computed.get("a", 0)
            got.append(session.step({"a": tokens[start : start + size]}, prompt_lens={"a": len(tokens)})["a"])
        self.assert_close(torch.cat(got), wanted)

    def test_rows_do_not_influence_each_other(self) -> None:
        model = self.loaded()
        rows = {"a": self.tokens(9, seed=1), "b": self.tokens(1, seed=2), "c": self.tokens(14, seed=3)}
        together, reverse = self.session(model).step(rows), self.session(model).step(dict(reversed(rows.items())))
        for name, tokens in rows.items():
            alone = self.session(model).step({name: tokens})[name]
            self.assert_close(together[name], alone)
            self.assert_close(reverse[name], alone)

    def test_prefill_and_decode_in_one_step(self) -> None:
        model, a, b = self.loaded(), self.tokens(8, seed=1), self.tokens(6, seed=2)
        session = self.session(model)
        session.step({"a": a[:-1]}, prompt_lens={"a": len(a)})
        mixed = session.step({"b": b, "a": a[-1:]})
        self.assert_close(mixed["a"], self.session(model).step({"a": a})["a"][-1:])
        self.assert_close(mixed["b"], self.session(model).step({"b": b})["b"])

    def test_forward_keeps_no_state(self) -> None:
        model, tokens = self.loaded(), self.tokens(6)
        first = self.session(model).step({"a": tokens})["a"]
        self.session(model).step({"x": self.tokens(11, seed=5)})
        assert torch.equal(self.session(model).step({"a": tokens})["a"], first)

    # weights --------------------------------------------------------------------------------------------------------

    def test_every_tensor_of_the_checkpoint_counts(self) -> None:
        tensors, tokens = self.tensors(), self.tokens(6)
        wanted = self.session().step({"a": tokens})["a"]
        for name, tensor in tensors.items():
            model = self.make()
            model.load_weights(memory_handles({**tensors, name: tensor * 1.5 + 0.25}))
            changed = self.session(model).step({"a": tokens})["a"]
            assert not torch.allclose(changed, wanted, atol=1e-3), f"{name} has no effect"

    def test_a_missing_tensor_is_named_before_anything_is_read(self) -> None:
        for name in self.tensors():
            tensors = self.tensors()
            del tensors[name]
            handles = memory_handles(tensors)
            with pytest.raises(WeightsError) as caught:
                self.make().load_weights(handles)
            assert name in str(caught.value)
            assert not any(handle.reads for handle in handles.values())

    def test_a_wrong_shape_is_told_with_both_shapes(self) -> None:
        for name, tensor in self.tensors().items():
            shorter = tensor[:-1]
            handles = memory_handles({**self.tensors(), name: shorter})
            with pytest.raises(WeightsError) as caught:
                self.make().load_weights(handles)
            for part in (name, str(list(tensor.shape)), str(list(shorter.shape))):
                assert part in str(caught.value)

    def test_all_problems_are_told_at_once(self) -> None:
        tensors = self.tensors()
        first, second, *_ = tensors
        del tensors[first]
        tensors[second] = tensors[second][:-1]
        with pytest.raises(WeightsError) as caught:
            self.make().load_weights(memory_handles(tensors))
        assert first in str(caught.value)
        assert second in str(caught.value)

    def test_an_unknown_tensor_changes_nothing(self) -> None:
        model, tokens = self.make(), self.tokens(6)
        model.load_weights(memory_handles({**self.tensors(), "foo.bar": torch.ones(3)}))
        assert torch.equal(self.session(model).step({"a": tokens})["a"], self.session().step({"a": tokens})["a"])
