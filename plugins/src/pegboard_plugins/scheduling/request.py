"""Request: one request inside the scheduler, and the counters that place it between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pegboard.contracts.scheduler import RequestStatus
from pegboard.contracts.views import RequestView
from pegboard.wire import EngineCoreRequest, Logprobs

if TYPE_CHECKING:
    from pegboard_plugins.scheduling.groups import PromptGroup

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
        "fork_step",
        "group",
        "in_turn",
        "kv_key",
        "last_step",
        "max_len",
        "min_len",
        "next_commit",
        "num_cached",
        "num_computed",
        "num_drafts",
        "num_entries",
        "num_placeholders",
        "num_preemptions",
        "num_prompt",
        "num_sent",
        "num_wanted_entries",
        "prompt_logprobs",
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

    def __init__(
        self, wire: EngineCoreRequest, arrival: int, max_len: int, *, salt_with_length: bool = False, in_turn: bool = False
    ) -> None:
        """``salt_with_length``: keys and values depend on the prompt's length, so only equally long prompts may share blocks.
        ``in_turn``: no token is planned before the one before it is known; so it is with a grammar in any case."""
        self.wire = wire
        self.request_id = wire.request_id
        self.ext = wire.ext
        self.token_ids = list(wire.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.stop_token_ids = frozenset(wire.stop_token_ids)
        self.min_len = self.num_prompt + wire.sampling.min_tokens
        """A stop token counts only beyond this length."""
        self.max_len = max_len
        self.in_turn = in_turn or wire.grammar is not None
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
        self.group: PromptGroup | None = None
        """Those who share its prompt."""
        self.fork_step = NEVER
        """First step whose plan may copy its prompt's keys and values: its blocks hold all of them before that plan runs."""
        self.num_wanted_entries = self.num_prompt - 1 if wire.sampling.prompt_logprobs is not None else 0
        self.num_entries = 0
        """Prompt logprobs that have come in: those of tokens 1 to ``num_entries``."""
        self.prompt_logprobs: list[Logprobs] = []
        """They wait here for the message with the first token."""
        self.num_cached = 0
        self.num_preemptions = 0
        self.salt = f"{wire.cache_salt or ''}\0prompt of {self.num_prompt}" if salt_with_length else wire.cache_salt
        """What its blocks' keys begin with: equal tokens under different salts do not share."""
        self.residency = 0
        self.kv_key = f"{self.request_id}@{arrival}"
        """Its name in the KV manager. Unique per stay: blocks of an earlier one may still wait for plans in flight."""

    @property
    def lacks_entries(self) -> bool:
        """Prompt positions must be computed for their logprobs, even where their keys and values are there."""
        return self.num_entries < self.num_wanted_entries

    @property
    def is_special(self) -> bool:
        """Its results take more than appending a token: it has a grammar, or prompt logprobs to report with its first token."""
        return self.wire.grammar is not None or (self.num_wanted_entries > 0 and len(self.token_ids) == self.num_prompt)

    def leave_batch(self) -> None:
        """Forget everything that only holds while it runs. Tokens and statistics stay."""
        self.slot = NO_SLOT
        self.num_computed = self.num_placeholders = self.num_drafts = self.num_sent = self.capacity = 0
        self.spec_token_ids = []
        self.first_step = self.next_commit = self.fork_step = NEVER
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
