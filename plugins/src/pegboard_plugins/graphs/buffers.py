"""Where graphs find their inputs and leave their results: one set of tensors, of which smaller graphs use the first rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.contracts.graph_runner import ForwardInputs, GraphTarget

Hidden = torch.Tensor | Mapping[str, torch.Tensor]


class InputBuffers:
    """Inputs of up to ``num_rows`` tokens. Rows after those of a step keep what was there, which is always valid."""

    def __init__(self, target: GraphTarget, num_rows: int) -> None:
        def ids() -> torch.Tensor:
            return torch.zeros(num_rows, dtype=torch.int64, device=target.device)

        self._ids = {"input_ids": ids(), "positions": ids()}
        if target.prompt_lens:
            self._ids["prompt_lens"] = ids()
        self._intermediate = {
            name: torch.zeros(num_rows, width, dtype=target.dtype, device=target.device) for name, width in target.widths.items()
        }

    def rows(self, count: int) -> ForwardInputs:
        """The first ``count`` tokens. What attention needs is not among it."""
        ids = {name: buffer[:count] for name, buffer in self._ids.items()}
        intermediate = {name: buffer[:count] for name, buffer in self._intermediate.items()}
        return ForwardInputs(**ids, attention=(), intermediate=intermediate or None)

    def fill(self, inputs: ForwardInputs) -> None:
        """Copies, in the order of the current stream."""
        for name, buffer in self._ids.items():
            given: torch.Tensor = getattr(inputs, name)
            buffer[: len(given)].copy_(given)
        for name, buffer in self._intermediate.items():
            assert inputs.intermediate is not None, "a later stage goes on with what the one before it has computed"
            buffer[: len(inputs.input_ids)].copy_(inputs.intermediate[name])


class OutputBuffers:
    """Results of up to ``num_rows`` tokens. A graph's own memory may be used by the others: results are copied out of it, as the
    last thing that a graph does."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._buffers: dict[str, torch.Tensor] = {}
        self._named = False

    def take(self, hidden: Hidden) -> None:
        """Copy a result. Room for it is made when there is one for the first time, which is before anything is recorded."""
        self._named = isinstance(hidden, Mapping)
        for name, tensor in hidden.items() if isinstance(hidden, Mapping) else (("", hidden),):
            if name not in self._buffers:
                self._buffers[name] = tensor.new_zeros(self._num_rows, *tensor.shape[1:])
            self._buffers[name][: len(tensor)].copy_(tensor)

    def rows(self, count: int) -> Hidden:
        """The first ``count`` tokens' results, in the form in which the model returns them."""
        found = {name: buffer[:count] for name, buffer in self._buffers.items()}
        return found if self._named else found[""]
