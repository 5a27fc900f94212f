"""Room in the context: how much of a prompt is kept, and how many tokens may follow it."""

from __future__ import annotations

from pegboard.engine.info import EngineInfo
from pegboard.wire import SamplingParams


def truncated(token_ids: list[int], params: SamplingParams, info: EngineInfo) -> list[int]:
    """The end of a prompt that ``truncate_prompt_tokens`` keeps; for -1 as much as leaves room for ``max_tokens``, or where that
    is open for ``min_tokens`` and one token at least."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        wanted = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        keep = max(1, info.max_tokens - wanted)
    return token_ids[-keep:]


def output_room(prompt_len: int, params: SamplingParams, info: EngineInfo, fit: bool = False) -> int:
    """``max_tokens`` with the context limit applied; with ``fit`` it is lowered to that instead of refused. Raises ``ValueError``
    naming the prompt's length, the limit and what to do."""
    limit, reason = info.max_tokens, info.reason
    room = limit - prompt_len
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_len} tokens and leaves no room for output; the limit for prompt and output is "
            f"{reason}; shorten the prompt to at most {limit - 1} tokens, or give truncate_prompt_tokens=-1"
        )
    if params.max_tokens is not None and params.max_tokens > room and not fit:
        raise ValueError(
            f"prompt of {prompt_len} tokens + max_tokens={params.max_tokens} = {prompt_len + params.max_tokens} tokens "
            f"is over the limit of {reason}; lower max_tokens to at most {room}, or give None for as many as fit"
        )
    if params.min_tokens > room:
        raise ValueError(
            f"min_tokens={params.min_tokens} after a prompt of {prompt_len} tokens is over the limit of {reason}; "
            f"lower min_tokens to at most {room}"
        )
    return room if params.max_tokens is None else min(params.max_tokens, room)
