"""Which precision a model computes in, and its KV cache has."""

from __future__ import annotations

import logging

from pegboard.contracts.platform import Platform

log = logging.getLogger(__name__)

FLOAT8 = "float8_e4m3fn"
_FRACTION_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}


def resolve_dtype(configured: str, stated: str | None, platform: Platform) -> str:
    """The name of the compute dtype: ``configured``, or for "auto" what the platform prefers for what the checkpoint ``stated``.

    Every conversion that loses precision or range is logged as a warning, other ones as information.
    """
    chosen = platform.preferred_dtype(stated) if configured == "auto" else configured
    if stated is None or stated == chosen:
        return chosen
    reason = f"the {platform.name} platform's choice for it" if configured == "auto" else "as dtype asks"
    if _loses(stated, chosen):
        log.warning("the checkpoint states %s, computing in %s (%s): weights are rounded", stated, chosen, reason)
    else:
        log.info("the checkpoint states %s, computing in %s (%s)", stated, chosen, reason)
    return chosen


def _loses(stated: str, chosen: str) -> bool:
    smaller_range = chosen == "float16" and stated != "float16"
    return smaller_range or _FRACTION_BITS.get(stated, 99) > _FRACTION_BITS[chosen]
