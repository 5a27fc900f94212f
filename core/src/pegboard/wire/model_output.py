"""What the output rank sends back after a step."""

from __future__ import annotations

from typing import Any

import msgspec


class Logprobs(msgspec.Struct, frozen=True):
    """Log probabilities of one output token: the chosen token first, then the best alternatives in falling order.

    ``token_ids``, ``logprobs`` have length ``k`` or ``k + 1`` (``k + 1`` where the chosen token is not among the best
    ``k``); ``rank`` is the chosen token's place in the whole vocabulary, counted from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class ModelRunnerOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Results of step ``step_id``. ``sampled_token_ids`` is aligned with ``slots``: one list per row, empty for
    intermediate prefill chunks, longer than one where drafts were accepted.

    ``logprobs`` is sparse: row index to one ``Logprobs`` per sampled token.
    ``prompt_logprobs`` is sparse too: row index to one ``Logprobs`` per prompt token that this step's chunk predicts. A chunk
    from position ``c`` on predicts the tokens ``c + 1`` to ``c + chunk``, as far as they are prompt.
    ``errors``: row index to message, for rows that failed alone (for example logits that are not a number).
    The scheduler matches results to plans by ``step_id``: with several steps in flight a row may be stale (its request
    was preempted or finished since), and is dropped there.
    """

    step_id: int
    slots: list[int]
    sampled_token_ids: list[list[int]]
    logprobs: dict[int, list[Logprobs]] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, list[Logprobs]] = msgspec.field(default_factory=dict)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    draft_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    connector_output: bytes | None = None
    ext: dict[str, Any] = msgspec.field(default_factory=dict)
