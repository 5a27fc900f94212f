"""EngineCoreClient: how a front end talks to an engine core, wherever that runs."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

from pegboard.engine.core import EngineCore
from pegboard.engine.info import EngineInfo
from pegboard.wire import EngineCoreOutputs, EngineCoreRequest, SchedulerStats


class EngineCoreClient(abc.ABC):
    """Every method may raise ``EngineDeadError``; none blocks longer than the core needs for one step."""

    info: EngineInfo

    @abc.abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over a request. Raises ``ValueError`` where the core refuses it at once."""

    @abc.abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored. Their slots and blocks are free afterwards."""

    @abc.abstractmethod
    def get_outputs(self, with_stats: bool = False) -> EngineCoreOutputs:
        """News of the next step; empty when there is nothing to do."""

    @abc.abstractmethod
    def has_requests(self) -> bool:
        """True while ``get_outputs`` has something to do."""

    @abc.abstractmethod
    def stats(self) -> SchedulerStats: ...

    @abc.abstractmethod
    def reset_prefix_cache(self) -> bool: ...

    @abc.abstractmethod
    def collective_rpc(
        self,
        method: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]: ...

    @abc.abstractmethod
    def check_health(self) -> None: ...

    @abc.abstractmethod
    def shutdown(self) -> None: ...


class InProcessClient(EngineCoreClient):
    """The core in this very process: ``get_outputs`` runs its step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.info = core.info

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.core.abort_requests(request_ids)

    def get_outputs(self, with_stats: bool = False) -> EngineCoreOutputs:
        outputs = self.core.step()
        return EngineCoreOutputs(outputs=outputs, stats=self.core.stats() if with_stats else None)

    def has_requests(self) -> bool:
        return self.core.has_requests()

    def stats(self) -> SchedulerStats:
        return self.core.stats()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def collective_rpc(
        self,
        method: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        return self.core.collective_rpc(method, args, kwargs, timeout=timeout)

    def check_health(self) -> None:
        self.core.check_health()

    def shutdown(self) -> None:
        self.core.shutdown()
