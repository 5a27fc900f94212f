"""Links: a worker's ways to the other ranks of its engine, and its place in the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pegboard.contracts.communicator import Communicator
from pegboard.wire import World

if TYPE_CHECKING:
    from pegboard.plugins import Composition

PATIENCE = 1800.0
"""Seconds for which ranks wait for one another: loading a large checkpoint may take one rank so much longer than another. A rank
that has ended is told at once."""

Intermediate = Mapping[str, torch.Tensor]


class Links:
    """``tp``: among the ranks that share this rank's layers. ``pp``: among those with its place in the other stages. None where
    there is one rank.

    Constructed on all ranks at the same time.
    """

    def __init__(self, composition: Composition, world: World, device: torch.device, timeout: float | None) -> None:
        """``timeout``: seconds of a step, or None; waiting is longer in any case."""
        self.world, self._device = world, device
        self._timeout = max(timeout or 0.0, PATIENCE)
        self.tp: Communicator | None = None
        self.pp: Communicator | None = None
        try:
            self.tp = self._open(composition, f"tp{world.pp_rank}", world.tp_rank, world.tp_size)
            self.pp = self._open(composition, f"pp{world.tp_rank}", world.pp_rank, world.pp_size)
        except BaseException:
            self.close()
            raise

    def barrier(self) -> None:
        """Returns when every rank has called it: first all of a stage meet, then all stages."""
        for communicator in (self.tp, self.pp):
            if communicator is not None:
                communicator.barrier()

    def close(self) -> None:
        for communicator in (self.tp, self.pp):
            if communicator is not None:
                communicator.close()
        self.tp = self.pp = None

    def _open(self, composition: Composition, group: str, rank: int, size: int) -> Communicator | None:
        if size == 1:
            return None
        communicator: Communicator = composition.create(
            "communicator",
            rank=rank,
            world_size=size,
            group=group,
            rendezvous=self.world.rendezvous,
            device=self._device,
            timeout=self._timeout,
        )
        return communicator


class Stage:
    """Takes what the stage before has computed, and gives the next one what this one has.

    ``widths``: of the tensors that pass, by name.
    """

    def __init__(
        self, world: World, communicator: Communicator | None, widths: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``communicator``: among the stages."""
        self._communicator, self._widths, self._dtype, self._device = communicator, dict(widths), dtype, device
        self.is_first, self.is_last = world.is_first_stage, world.is_last_stage
        self.is_only = self.is_first and self.is_last

    @classmethod
    def only(cls) -> Stage:
        """Of a pipeline of one."""
        return cls(World(), None, {}, torch.float32, torch.device("cpu"))

    def blank(self, num_tokens: int) -> Intermediate | None:
        """What comes from the stage before, as zeros; None on the first."""
        return None if self.is_first else {name: tensor.zero_() for name, tensor in self._empty(num_tokens).items()}

    def receive(self, num_tokens: int) -> Intermediate | None:
        """What the stage before has computed for this step's tokens; None on the first."""
        if self.is_first:
            return None
        pp = self._communicator
        assert pp is not None, "stages are linked"
        return {name: pp.recv(tensor, pp.rank - 1) for name, tensor in self._empty(num_tokens).items()}

    def send(self, tensors: torch.Tensor | Intermediate) -> None:
        """Raises ``TypeError`` where the model has not returned what it says it hands on."""
        pp = self._communicator
        assert pp is not None, "stages are linked"
        if not isinstance(tensors, Mapping) or tensors.keys() != self._widths.keys():
            found = sorted(tensors) if isinstance(tensors, Mapping) else type(tensors).__name__
            raise TypeError(f"a stage that is not the last must return the tensors {sorted(self._widths)}, not {found}")
        for name in self._widths:
            pp.send(tensors[name].to(self._dtype), pp.rank + 1)

    def _empty(self, num_tokens: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(num_tokens, width, dtype=self._dtype, device=self._device) for name, width in self._widths.items()
        }
