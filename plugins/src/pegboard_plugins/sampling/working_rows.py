"""WorkingRows: the rows of a batch that operations change in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True)
class WorkingRows:
    """R rows of logits, float32 where they are changed: those of batch row ``r`` are ``x[place[r], :size]``.

    ``x`` [M, width] is the logits themselves where these can be changed in place, else a copy; contiguous where it is changed.
    """

    x: torch.Tensor
    size: int
    rows: np.ndarray
    place: np.ndarray
    """[N]: from batch row to row of ``x``."""

    @classmethod
    def of(cls, logits: torch.Tensor, size: int, rows: np.ndarray, *, written: bool) -> WorkingRows:
        """``rows`` [R], rising, of ``logits`` [N, width], of which the first ``size`` ids count. Rows that are only read keep
        their type on a device; numpy does not know all of them."""
        place = np.arange(len(logits))
        exact = logits.dtype == torch.float32
        if (exact and logits.is_contiguous()) if written else (exact or logits.device.type != "cpu"):
            return cls(logits, size, rows, place)
        place[rows] = np.arange(len(rows))
        chosen = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
        return cls(chosen[:, :size].float().contiguous(), size, rows, place)

    @property
    def on_host(self) -> bool:
        return self.x.device.type == "cpu"

    @property
    def logits(self) -> torch.Tensor:
        """[M, size]."""
        return self.x[:, : self.size]

    def index(self, values: np.ndarray) -> torch.Tensor:
        """A host array where the logits are."""
        return torch.from_numpy(values).to(self.x.device)

    def cells(self, rows: Iterable[int], ids: list[np.ndarray], *columns: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Places in ``x.view(-1)`` of ``ids[j]`` in the j-th of batch ``rows``, joined [K], and ``columns`` [K] of values that
        belong to them. Ids without a logit are left out, with their values."""
        places = self.place[list(rows)]
        joined = np.concatenate(ids, dtype=np.int64)
        cells = np.repeat(places * self.x.shape[1], [len(part) for part in ids]) + joined
        if joined.size and joined.view(np.uint64).max() >= self.size:  # as unsigned, negative ids are large
            inside = joined.view(np.uint64) < self.size
            cells, columns = cells[inside], tuple(column[inside] for column in columns)
        return tuple(self.index(values) for values in (cells, *columns))

    def maxima(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Highest logits [R] float32 of batch ``rows``, and the first id [R] of each. A NaN counts as the highest.

        On a CPU numpy finds them about ten times faster than torch.
        """
        places = self.place[rows]
        if self.on_host:
            values = self.logits.numpy()
            ids = np.array([values[place].argmax() for place in places.tolist()], np.int64)
            return values[places, ids], ids
        chosen = self.logits if len(places) == len(self.x) else self.logits[self.index(places)]  # both in rising order
        where = chosen.argmax(dim=-1, keepdim=True)
        return chosen.gather(1, where)[:, 0].float().cpu().numpy(), where[:, 0].cpu().numpy()
