"""Request: one request inside the scheduler, and the counters that place it between steps."""

from __future__ import annotations

from typing import Final

from pegboard.contracts.scheduler import RequestStatus
from pegboard.contracts.views import RequestView
from pegboard.wire import EngineCoreRequest

NO_SLOT: Final = -1
NEVER: Final = 1 << 62
"""A step that never comes: results of an ended or waiting request are stale whatever plan they belong to."""


class Request:
    """Mutable; only the scheduler's own modules touch it, policies get ``view()``.

    ``token_ids`` holds the prompt and the output that is known. ``num_computed`` counts tokens whose KV data is in the cache
    once every plan made so far has run: it moves when a plan is made, not when its result arrives. ``num_placeholders``
    counts tokens that plans in flight will sample. What is left to compute is therefore always
    ``len(token_ids) + num_placeholders - num_computed``: a whole prompt, the rest of one, or the last token.

    ``max_len`` is the length, prompt included, at which the request ends whatever it says.
    """

    __slots__ = (
        "arrival",
        "capacity",
        "ext",
        "first_step",
        "kv_key",
        "last_step",
        "max_len",
        "min_len",
        "next_commit",
        "num_cached",
        "num_computed",
        "num_drafts",
        "num_placeholders",
        "num_preemptions",
        "num_prompt",
        "num_sent",
        "request_id",
        "residency",
        "salt",
        "slot",
        "spec_token_ids",
        "status",
        "stop_token_ids",
        "token_ids",
        "wire",
    )

    def __init__(self, wire: EngineCoreRequest, arrival: int, max_len: int, *, salt_with_length: bool = False) -> None:
        """``salt_with_length``: keys and values depend on the prompt's length, so only equally long prompts may share blocks."""
        self.wire = wire
        self.request_id = wire.request_id
        self.ext = wire.ext
        self.token_ids = list(wire.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.stop_token_ids = frozenset(wire.stop_token_ids)
        self.min_len = self.num_prompt + wire.sampling.min_tokens
        """A stop token counts only beyond this length."""
        self.max_len = max_len
        self.arrival = arrival
        """Order of arrival at the scheduler."""
        self.status = RequestStatus.WAITING
        self.slot = NO_SLOT
        self.num_computed = 0
        self.num_placeholders = 0
        self.num_drafts = 0
        """Draft tokens in flight; until their result is in, it is not known where the next token goes."""
        self.spec_token_ids: list[int] = []
        """Drafts for the next step."""
        self.num_sent = 0
        """Tokens that the workers have, where they do not keep their own samples."""
        self.capacity = 0
        """Tokens that fit in the blocks it holds."""
        self.next_commit = NEVER
        """Computed tokens at which another block is full and can be published."""
        self.first_step = NEVER
        """First step of its present stay in the batch; results of earlier ones are stale."""
        self.last_step = 0
        """Last step that was planned for it."""
        self.num_cached = 0
        self.num_preemptions = 0
        self.salt = f"{wire.cache_salt or ''}\0prompt of {self.num_prompt}" if salt_with_length else wire.cache_salt
        """What its blocks' keys begin with: equal tokens under different salts do not share."""
        self.residency = 0
        self.kv_key = f"{self.request_id}@{arrival}"
        """Its name in the KV manager. Unique per stay: blocks of an earlier one may still wait for plans in flight."""

    def leave_batch(self) -> None:
        """Forget everything that only holds while it runs. Tokens and statistics stay."""
        self.slot = NO_SLOT
        self.num_computed = self.num_placeholders = self.num_drafts = self.num_sent = self.capacity = 0
        self.spec_token_ids = []
        self.first_step = self.next_commit = NEVER
        self.residency += 1
        self.kv_key = f"{self.request_id}@{self.arrival}.{self.residency}"

    def view(self, num_blocks: int = 0) -> RequestView:
        """What policies and queues see of it now."""
        return RequestView(
            request_id=self.request_id,
            arrival_time=self.wire.arrival_time,
            priority=self.wire.priority,
            num_prompt_tokens=self.num_prompt,
            num_output_tokens=len(self.token_ids) - self.num_prompt,
            num_computed_tokens=self.num_computed,
            max_tokens=self.wire.max_tokens,
            num_blocks=num_blocks,
            num_preemptions=self.num_preemptions,
            ext=self.ext,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, tokens={len(self.token_ids)}, computed={self.num_computed}, "
            f"placeholders={self.num_placeholders}, slot={self.slot})"
        )
