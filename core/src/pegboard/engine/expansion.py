"""Expansion: from a caller's request to the requests that the engine core gets, one per answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.engine.seeds import shifted
from pegboard.plugins.errors import PluginError
from pegboard.wire import EngineCoreRequest

if TYPE_CHECKING:
    from pegboard.plugins import PluginHost


class Expander:
    """Makes the requests for the engine core, which have ids of their own.

    An id in the core is that of the answer (the caller's id, with ``#0``, ``#1`` … for several answers), "@", and the number of
    the request in this front end. So no two of them are ever equal, whatever ids a caller or a plugin chooses: a caller may use
    an id again at once, and what still comes for the earlier request, or is still asked on its behalf, cannot reach the later
    one.
    """

    def __init__(self, host: PluginHost) -> None:
        self._host = host
        self._count = itertools.count()

    def __call__(self, request: EngineCoreRequest) -> list[EngineCoreRequest]:
        """One request for the core per answer, in the order in which answers are reported.

        Raises ``PluginError`` naming the plugin whose ``expand_request`` gave what cannot be used, and the ``ValueError`` of one
        that refuses the request.
        """
        answers = [request] if request.sampling.n == 1 else self._by_plugins(request) or children(request)
        suffix = f"@{next(self._count)}"
        replace = msgspec.structs.replace
        return [
            replace(a, request_id=a.request_id + suffix, group=None if a.group is None else a.group + suffix) for a in answers
        ]

    def _by_plugins(self, request: EngineCoreRequest) -> Sequence[EngineCoreRequest] | None:
        """What the hook ``expand_request`` answers, checked; None when all plugins abstain."""
        asked = self._host.hook.implemented_by("expand_request")
        if not asked:
            return None
        who = " or ".join(asked)
        try:
            answer = self._host.hook.expand_request(request=request)
        except ValueError:
            raise
        except Exception as error:
            raise PluginError(f"expand_request failed in {who}: {type(error).__name__}: {error}") from error
        if answer is None:
            return None
        problem = _problem(answer)
        if problem:
            raise PluginError(f"expand_request of {who}, asked for request {request.request_id!r}: {problem}")
        return list(answer)


def children(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """``sampling.n`` requests in one group, each as one of its own with ``seed + i``; the first asks for prompt logprobs."""
    made, sampling = [], request.sampling
    assert sampling.seed is not None, "seeds are drawn before a request is expanded"
    for i in range(sampling.n):
        own = msgspec.structs.replace(
            sampling, n=1, seed=shifted(sampling.seed, i), prompt_logprobs=None if i else sampling.prompt_logprobs
        )
        name, parent = f"{request.request_id}#{i}", request.request_id
        made.append(msgspec.structs.replace(request, request_id=name, group=parent, sampling=own))
    return made


def _problem(answer: object) -> str:
    """Why a plugin's answer cannot be used, or nothing."""
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or not answer:
        return f"it must give a non-empty list of requests, and gave {answer!r:.80}"
    wrong = [r for r in answer if not isinstance(r, EngineCoreRequest)]
    if wrong:
        return f"it must give EngineCoreRequest objects, and gave {wrong[0]!r:.80}"
    ids = [r.request_id for r in answer]
    if not all(isinstance(i, str) and i for i in ids):
        return f"request ids must be non-empty texts, and it gave {ids!r:.200}"
    twice = next((i for i in ids if ids.count(i) > 1), None)
    if twice is not None:
        return f"request ids must differ, and it gave {twice!r} to several requests"
    return next((p for r in answer if (p := _request_problem(r, answer))), "")


def _request_problem(request: EngineCoreRequest, all_of_them: Sequence[EngineCoreRequest]) -> str:
    name, sampling = f"its request {request.request_id!r}", request.sampling
    if sampling.n != 1:
        return f"{name} has sampling.n={sampling.n}, and must have 1"
    if sampling.seed is None:
        return f"{name} has no seed; give each one of its own"
    if not request.prompt_token_ids or request.max_tokens < 1:
        counts = f"{len(request.prompt_token_ids)} prompt tokens and max_tokens={request.max_tokens}"
        return f"{name} has {counts}; both must be at least 1"
    first = next(r for r in all_of_them if r.group == request.group)
    if request.group is not None and (first.prompt_token_ids, first.cache_salt) != (request.prompt_token_ids, request.cache_salt):
        return f"{name} has another prompt or cache_salt than {first.request_id!r} of the same group"
    return ""
