"""PromptGroups: requests that are answers to one prompt, and who of them has computed it."""

from __future__ import annotations

import enum
from collections.abc import Callable

from pegboard_plugins.scheduling.request import Request

Key = tuple[str, str | None, tuple[int, ...]]
"""The group's name, the salt, the prompt."""


class Way(enum.Enum):
    """How a waiting request may get its prompt in the present plan."""

    COMPUTE = "compute"
    """By itself, like any request."""
    WAIT = "wait"
    """Not in this plan: another one computes it."""
    JOIN = "join"
    """From the one whose prompt ends in this plan: nothing is computed, the first token is drawn from that row's logits."""
    FOLLOW = "follow"
    """From one whose prompt is computed; its own last prompt token is computed again, for the logits."""


class PromptGroup:
    """``members`` are all unfinished requests of the group. Of those that run, ``computing`` are in their prompt (one of them,
    unless members had to compute it for themselves), and ``computed`` may be forked from, each from its ``fork_step`` on."""

    __slots__ = ("computed", "computing", "key", "members")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.members: dict[str, Request] = {}
        self.computing: dict[str, Request] = {}
        self.computed: dict[str, Request] = {}

    def ending(self) -> Request | None:
        """The member whose row in the present plan ends the prompt, and with it all that it knows."""
        for request in self.computing.values():
            if request.num_computed == request.num_prompt == len(request.token_ids):
                return request
        return None

    def way(self, request: Request, step: int, can_follow: Callable[[Request], bool]) -> tuple[Way, Request | None]:
        """How the waiting member ``request`` starts in the plan of ``step``, and from whom. Members that have output already, or
        prompt logprobs to collect, compute; so does one that comes when the others' windows have left the prompt behind."""
        if len(request.token_ids) > request.num_prompt or request.lacks_entries:
            return Way.COMPUTE, None
        source = self.ending()
        if source is not None:
            return Way.JOIN, source
        followed = [member for member in self.computed.values() if can_follow(member)]
        for member in followed:
            if member.fork_step <= step:
                return Way.FOLLOW, member
        return (Way.WAIT if self.computing or followed else Way.COMPUTE), None


class PromptGroups:
    """All groups with an unfinished member. ``computing``: those in which somebody computes the prompt."""

    def __init__(self) -> None:
        self.groups: dict[Key, PromptGroup] = {}
        self.computing: dict[Key, PromptGroup] = {}

    def join(self, request: Request) -> None:
        """A new request; one without a group is none of this book's business."""
        if request.wire.group is None:
            return
        key = (request.wire.group, request.salt, tuple(request.token_ids))
        request.group = self.groups.setdefault(key, PromptGroup(key))
        request.group.members[request.request_id] = request

    def begin_prompt(self, request: Request) -> None:
        """``request`` enters the batch and computes its prompt."""
        group = request.group
        if group is not None:
            group.computing[request.request_id] = request
            self.computing[group.key] = group

    def end_prompt(self, request: Request, fork_step: int) -> None:
        """From the plan of ``fork_step`` on the blocks of ``request`` hold its whole prompt before the plan runs."""
        group = request.group
        if group is not None:
            self._stop_computing(request, group)
            group.computed[request.request_id] = request
            request.fork_step = fork_step

    def leave_batch(self, request: Request) -> None:
        group = request.group
        if group is not None:
            self._stop_computing(request, group)
            group.computed.pop(request.request_id, None)

    def end(self, request: Request) -> None:
        group = request.group
        if group is not None:
            self.leave_batch(request)
            del group.members[request.request_id]
            if not group.members:
                del self.groups[group.key]

    def _stop_computing(self, request: Request, group: PromptGroup) -> None:
        if group.computing.pop(request.request_id, None) is not None and not group.computing:
            del self.computing[group.key]

    def any_ending(self) -> bool:
        """Whether the present plan has a row that others may join without computing anything."""
        return any(group.ending() is not None for group in self.computing.values())

    def settle(self, step: int) -> None:
        """The plan of ``step`` is made: prompts that it ends can be forked from in the next one."""
        for group in list(self.computing.values()):
            for request in [r for r in group.computing.values() if r.num_computed >= r.num_prompt]:
                self.end_prompt(request, step + 1)
