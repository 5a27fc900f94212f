"""Serve the shortest waiting prompt first."""

from collections.abc import Iterable

from pegboard.contracts.request_queue import KeyedRequestQueue
from pegboard.contracts.views import RequestView
from pegboard.plugins import RequestQueueProvider, hookimpl


class ShortestPromptFirst(KeyedRequestQueue):
    def key(self, request: RequestView) -> int:
        return request.num_prompt_tokens


@hookimpl
def request_queues() -> Iterable[RequestQueueProvider]:
    yield RequestQueueProvider(name="shortest_prompt_first", target=ShortestPromptFirst, summary="shortest prompt first")
