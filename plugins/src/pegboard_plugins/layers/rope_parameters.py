"""What a checkpoint's configuration says about rotary position embeddings, in one form. Needs no torch.

Configurations say it in several ways: ``rope_theta`` beside ``rope_scaling`` with ``type`` (old) or ``rope_type`` (newer), or
everything inside ``rope_parameters`` (transformers 5). The meaning of each type follows transformers' modeling_rope_utils.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """``rotary_dim``: how many leading elements of each head are rotated. ``trained_len``: context length before scaling
    (``original_max_position_embeddings``, or ``max_position_embeddings`` if there is none). ``options``: what one type has alone.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    trained_len: int
    max_position_embeddings: int
    factor: float
    options: Mapping[str, Any]

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on the length of the sequence, and not on the position alone."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def max_model_len(self) -> int:
        """Context length that the checkpoint supports.

        Types that stretch a trained length give ``factor`` times it. llama3 and longrope checkpoints state the stretched
        length as ``max_position_embeddings`` themselves.
        """
        if self.rope_type in ("linear", "dynamic", "yarn"):
            return int(self.factor * self.trained_len)
        return self.max_position_embeddings


def rope_parameters(config: Mapping[str, Any], head_size: int, where: str) -> RopeParameters:
    """Read them from the content of a config.json. ``where`` names the file in errors; raises ``ValueError``."""
    section, stated = _section(config, where)
    rope_type = stated.get("rope_type", stated.get("type")) or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{where}: {section} has unknown rope_type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}")
    max_positions = _number(config, "max_position_embeddings", where, minimum=1)
    theta = stated.get("rope_theta", config.get("rope_theta"))
    theta = 10000.0 if theta is None else _number({"rope_theta": theta}, "rope_theta", where, above=0)
    original = config.get("original_max_position_embeddings", stated.get("original_max_position_embeddings"))
    rotary_dim = _rotary_dim(config, stated, rope_type, head_size, where)
    if original is None or rope_type in ("default", "linear", "dynamic"):
        trained_len = int(max_positions)
    else:
        values = {"original_max_position_embeddings": original}
        trained_len = int(_number(values, "original_max_position_embeddings", f"{where}: {section}", minimum=1))
    return RopeParameters(
        rope_type=rope_type,
        theta=float(theta),
        rotary_dim=rotary_dim,
        trained_len=trained_len,
        max_position_embeddings=int(max_positions),
        factor=_factor(stated, rope_type, original, max_positions, f"{where}: {section}"),
        options=_options(stated, rope_type, rotary_dim, f"{where}: {section}"),
    )


def ignored_partial_rotary(config: Mapping[str, Any], parameters: RopeParameters, head_size: int) -> bool:
    """Whether the configuration asks for a partial rotation that ``rope_parameters`` left aside (see ``_rotary_dim``)."""
    stated = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("partial_rotary_factor")
    share = stated if stated is not None else config.get("partial_rotary_factor")
    return share is not None and int(head_size * share) != parameters.rotary_dim


def _section(config: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    for name in ("rope_parameters", "rope_scaling"):
        stated = config.get(name)
        if stated:
            if not isinstance(stated, Mapping):
                raise ValueError(f"{where}: {name} must be an object, not {stated!r}")
            if any(isinstance(value, Mapping) for value in stated.values()):
                raise ValueError(
                    f"{where}: {name} differs per layer type ({', '.join(stated)}), which this architecture does not support"
                )
            return name, stated
    return "rope_parameters", {}


def _rotary_dim(config: Mapping[str, Any], stated: Mapping[str, Any], rope_type: str, head_size: int, where: str) -> int:
    """``partial_rotary_factor`` of the head. With the default type it is left aside, as transformers' implementations of the
    Llama family do: their frequencies then span the whole head, and so they did when the checkpoint was trained."""
    share = stated.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None:
        return _even(head_size, head_size, where)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"{where}: partial_rotary_factor must be more than 0 and at most 1, not {share!r}")
    return _even(head_size if rope_type == "default" else int(head_size * share), head_size, where)


def _even(rotary_dim: int, head_size: int, where: str) -> int:
    if rotary_dim % 2 or rotary_dim == 0:
        raise ValueError(f"{where}: rotary embeddings turn pairs, so {rotary_dim} of {head_size} head elements cannot be rotated")
    return rotary_dim


def _factor(stated: Mapping[str, Any], rope_type: str, original: Any, max_positions: float, where: str) -> float:
    factor = stated.get("factor")
    if factor is None:
        if rope_type == "default":
            return 1.0
        if rope_type == "longrope" or (rope_type == "yarn" and original is not None):
            return float(max_positions) / float(original or max_positions)
        raise ValueError(f"{where} lacks 'factor', which rope_type {rope_type!r} needs")
    return _number(stated, "factor", where, minimum=1)


def _options(stated: Mapping[str, Any], rope_type: str, rotary_dim: int, where: str) -> dict[str, Any]:
    if rope_type == "llama3":
        low = _number(stated, "low_freq_factor", where, above=0)
        high = _number(stated, "high_freq_factor", where, above=0)
        if high <= low:
            raise ValueError(f"{where}: high_freq_factor ({high}) must be greater than low_freq_factor ({low})")
        return {"low_freq_factor": low, "high_freq_factor": high}
    if rope_type == "yarn":
        names = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        found: dict[str, Any] = {n: _number(stated, n, where, minimum=0) for n in names if stated.get(n) is not None}
        return {**found, "truncate": bool(stated.get("truncate", True))}
    if rope_type == "longrope":
        found = {}
        for name in ("short_factor", "long_factor"):
            values = stated.get(name)
            wanted = rotary_dim // 2
            if not isinstance(values, list) or len(values) != wanted or not all(_is_number(v) and v > 0 for v in values):
                raise ValueError(f"{where}: {name} must be a list of {wanted} positive numbers, one per rotated pair")
            found[name] = tuple(float(v) for v in values)
        if stated.get("attention_factor") is not None:
            found["attention_factor"] = _number(stated, "attention_factor", where, minimum=0)
        return found
    return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(
    values: Mapping[str, Any], name: str, where: str, *, minimum: float | None = None, above: float | None = None
) -> float:
    value = values.get(name)
    if value is None:
        raise ValueError(f"{where} lacks {name!r}")
    if not _is_number(value) or (minimum is not None and value < minimum) or (above is not None and value <= above):
        bound = f"at least {minimum:g}" if minimum is not None else f"more than {above:g}"
        raise ValueError(f"{where}: {name} must be a number, {bound}, not {value!r}")
    return float(value)
