"""Expansion: from a caller's request to the requests that the engine core gets, one per answer."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.engine.info import EngineInfo
from pegboard.engine.seeds import shifted
from pegboard.engine.vocabulary import check_token_ids
from pegboard.plugins.errors import PluginError
from pegboard.wire import EngineCoreRequest, SamplingParams

if TYPE_CHECKING:
    from pegboard.plugins import PluginHost


class Expander:
    """Makes the requests for the engine core, which have ids of their own.

    An id in the core is that of the answer (the caller's id, with ``#0``, ``#1`` … for several answers), "@", and the number of
    the request in this front end. So no two of them are ever equal, whatever ids a caller or a plugin chooses: a caller may use
    an id again at once, and what still comes for the earlier request, or is still asked on its behalf, cannot reach the later
    one.
    """

    def __init__(self, host: PluginHost, info: EngineInfo) -> None:
        self._host, self._info = host, info
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
        problem = _problem(answer, self._info)
        if problem:
            raise PluginError(f"expand_request of {who}, asked for request {request.request_id!r}: {problem}")
        return list(answer)


def children(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """``sampling.n`` requests in one group, each as one of its own with ``seed + i``; the first asks for prompt logprobs."""
    made, sampling = [], request.sampling
    for i in range(sampling.n):
        name, parent = f"{request.request_id}#{i}", request.request_id
        made.append(msgspec.structs.replace(request, request_id=name, group=parent, sampling=_own(sampling, i)))
    return made


def _own(sampling: SamplingParams, i: int) -> SamplingParams:
    """The parameters of the ``i``-th answer. A copy, made without the checks: those of a bias for every id would stop the engine
    for seconds when they are repeated for each of many answers."""
    assert sampling.seed is not None, "seeds are drawn before a request is expanded"
    own, change = copy.copy(sampling), msgspec.structs.force_setattr
    change(own, "n", 1)
    change(own, "seed", shifted(sampling.seed, i))
    if i:
        change(own, "prompt_logprobs", None)
    return own


def _problem(answer: object, info: EngineInfo) -> str:
    """Why a plugin's answer cannot be used, or nothing."""
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or not answer:
        return f"it must give a non-empty list of requests, and gave {answer!r:.80}"
    wrong = [r for r in answer if not isinstance(r, EngineCoreRequest)]
    if wrong:
        return f"it must give EngineCoreRequest objects, and gave {wrong[0]!r:.80}"
    ids = [r.request_id for r in answer]
    if not all(isinstance(i, str) and i for i in ids):
        return f"request ids must be non-empty texts, and it gave {ids!r:.200}"
    twice = next((i for i, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        return f"request ids must differ, and it gave {twice!r} to several requests"
    problem = next((f"its request {r.request_id!r} {p}" for r in answer if (p := _request_problem(r, info))), "")
    return problem or _group_problem(answer)


def _request_problem(request: EngineCoreRequest, info: EngineInfo) -> str:
    """What the engine core relies on; a request of its own has it from ``InputProcessor``."""
    try:
        msgspec.convert({name: getattr(request, name) for name in request.__struct_fields__}, EngineCoreRequest)
    except msgspec.ValidationError as error:
        return f"has a field of a wrong type: {error}"
    if request.sampling.n != 1:
        return f"has sampling.n={request.sampling.n}, and must have 1"
    if request.sampling.seed is None:
        return "has no seed; give each one of its own"
    if request.sampling.structured_outputs is not None:
        return "has sampling.structured_outputs, which is not looked at here; set grammar"
    length, room = len(request.prompt_token_ids), request.max_tokens
    if not length or room < 1:
        return f"has {length} prompt tokens and max_tokens={room}; both must be at least 1"
    if length + room > info.max_tokens:
        return f"has {length} prompt tokens and max_tokens={room}, together over the limit of {info.reason}"
    try:
        check_token_ids("prompt_token_ids", request.prompt_token_ids, info.vocab_size)
    except ValueError as error:
        return f"cannot be computed: {error}"
    return ""


def _group_problem(answer: Sequence[EngineCoreRequest]) -> str:
    first: dict[str, EngineCoreRequest] = {}
    for request in answer:
        if request.group is None:
            continue
        other = first.setdefault(request.group, request)
        if (other.prompt_token_ids, other.cache_salt) != (request.prompt_token_ids, request.cache_salt):
            names = request.request_id, other.request_id
            return "its request {!r} has another prompt or cache_salt than {!r} of the same group".format(*names)
    return ""
