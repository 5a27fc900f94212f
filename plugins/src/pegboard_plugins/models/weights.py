"""From named checkpoint tensors to a model's parameters: checks before anything is read, then casting and fusing."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from pegboard.contracts.weight_loader import WeightHandle, WeightsError
from pegboard_plugins.models.decoder_tensors import EMBEDDING, HEAD, Parameter, Source

logger = logging.getLogger(__name__)

MAX_LISTED = 10

HARMLESS = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.masked_bias|self_attn\.masked_bias)$")
"""Buffers that older tools saved with the weights. Ignored without a word; other unknown tensors are ignored with a warning."""

_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def name_table(weights: Mapping[str, WeightHandle], tied: bool) -> dict[str, WeightHandle]:
    """The handles, where a tied checkpoint may hold its one table under the head's name only."""
    found = dict(weights)
    if tied and HEAD in found and EMBEDDING not in found:
        found[EMBEDDING] = found.pop(HEAD)
    return found


def warn_of_differing_head() -> None:
    """A configuration that ties the head to the table is followed, as transformers does, except where the checkpoint holds a head
    that differs: then that head is used."""
    logger.warning(
        "the configuration ties %s to %s, but the checkpoint holds different values for both: each is used as it is stored; "
        'set "tie_word_embeddings": false in config.json to silence this',
        HEAD,
        EMBEDDING,
    )


def check_tensors(weights: Mapping[str, WeightHandle], parameters: Iterable[Parameter], num_layers: int) -> None:
    """Compare names and shapes with what the model needs; reads nothing. Raises ``WeightsError`` listing all kinds of problem."""
    wanted = {source.name: source for parameter in parameters for source in parameter.sources}
    missing = [_describe(source) for name, source in wanted.items() if name not in weights]
    wrong = [
        f"{_describe(source)}, found {list(weights[name].shape)}"
        for name, source in wanted.items()
        if name in weights and tuple(weights[name].shape) != source.shape
    ]
    extra = [name for name in weights if name not in wanted and not HARMLESS.search(name)]
    beyond = sorted({int(m[1]) for name in extra if (m := LAYER.match(name)) and int(m[1]) >= num_layers})
    problems = [*listed("missing", missing), *listed("wrong shape", wrong)]
    if beyond:
        problems.append(
            f"layers {beyond[0]} to {beyond[-1]} are in the checkpoint, but its configuration says num_hidden_layers is "
            f"{num_layers}; correct it to {beyond[-1] + 1} if the file is the right one"
        )
    if HEAD in wanted and HEAD not in weights:
        problems.append(
            f"{HEAD} is missing and the configuration does not tie it to {EMBEDDING}; if this model shares them, "
            'set "tie_word_embeddings": true in config.json'
        )
    if problems:
        raise WeightsError("the checkpoint does not fit the model: " + "; ".join(problems))
    if extra:
        logger.warning("ignored %d tensors that the model does not use: %s", len(extra), shortened(extra))


class ParameterReader:
    """Reads parameters in ``dtype`` on ``device``, and counts the casts that lose precision or range."""

    def __init__(self, weights: Mapping[str, WeightHandle], dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.dtype, self.device = weights, dtype, device
        self._lossy: Counter[str] = Counter()

    def read(self, parameter: Parameter) -> torch.Tensor:
        """This rank's part of the sources, cast and joined, in memory of their own."""
        joined = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
        start = 0
        for source in parameter.sources:
            rows = source.part_shape[0]
            if rows:
                stored = self._stored(source)
                self.check_cast(source.name, stored)
                joined[start : start + rows].copy_(stored)
            start += rows
        joined[start:] = 0
        return joined

    def _stored(self, source: Source) -> torch.Tensor:
        handle, part = self.weights[source.name], source.part
        return handle.read() if part is None else handle.read_slice(part.dim, part.span.start, part.span.length)

    def log_casts(self) -> None:
        """One line on all casts to a type that holds less."""
        for stored, count in self._lossy.items():
            logger.info("%d tensors were stored as %s and are used as %s", count, stored, _name(self.dtype))

    def check_cast(self, name: str, stored: torch.Tensor) -> None:
        """Count a cast that loses something. Raises ``WeightsError`` for one that cannot be made."""
        if stored.dtype not in _WEIGHT_TYPES:
            raise WeightsError(f"{name} is stored as {_name(stored.dtype)}, which is no weight that this model can use")
        if torch.promote_types(stored.dtype, self.dtype) == self.dtype:
            return
        self._lossy[_name(stored.dtype)] += 1
        if self.dtype == torch.float16:  # the only one whose range ends where weights may be
            largest, limit = float(stored.abs().amax()), torch.finfo(torch.float16).max
            if largest > limit:
                raise WeightsError(
                    f"{name} holds values up to {largest:g}, outside the range of float16 (at most {limit:g}); "
                    "use dtype bfloat16 or float32"
                )


def _describe(source: Source) -> str:
    return f"{source.name} {list(source.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(kind: str, items: list[str]) -> list[str]:
    return [f"{len(items)} {kind}: {shortened(items)}"] if items else []


def shortened(items: list[str]) -> str:
    rest = len(items) - MAX_LISTED
    return ", ".join(items[:MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
